"""Charts as SVG: numbers in, markup out."""
