"""Pictures and pages: numbers in, HTML and SVG out. Nothing here reads a file."""
