"""Finds texts with little contrast and small targets on a page in a browser."""

FAINT = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith("color(srgb") ? 255 : 1;
    return [unit * r, unit * g, unit * b, a];
  };
  const over = (top, [r, g, b]) => {
    const mix = (one, other) => top[3] * one + (1 - top[3]) * other;
    return [mix(top[0], r), mix(top[1], g), mix(top[2], b), 1];
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((n) => n / 255)
      .map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [a, b] = [luminance(one), luminance(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const background = (element) => {
    const tile = element.closest("g")?.querySelector(".tile");
    if (tile) return parse(getComputedStyle(tile).fill);
    if (!element) return [255, 255, 255, 1];
    const own = parse(getComputedStyle(element).backgroundColor);
    if (own[3] === 1 || element === document.documentElement) return own;
    return over(own, background(element.parentElement));
  };
  const opacity = (element) => (element === null ? 1
    : Number(getComputedStyle(element).opacity) * opacity(element.parentElement));
  const found = [];
  const check = (element, colour, text) => {
    const back = background(element);
    const front = parse(colour);
    front[3] *= opacity(element);
    const ratio = contrast(over(front, back), back);
    const least = element.matches(".sign") ? 3 : 4.5;
    if (ratio < least) found.push(`${ratio.toFixed(2)}: ${text.trim().slice(0, 40)}`);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode());) {
    const element = node.parentElement;
    const isShown = element.checkVisibility({ visibilityProperty: true });
    if (!node.data.trim() || !isShown || element.closest(":disabled, script")) continue;
    const style = getComputedStyle(element);
    check(element, element.closest("svg") ? style.fill : style.color, node.data);
  }
  for (const field of document.querySelectorAll("[placeholder]")) {
    check(field, getComputedStyle(field, "::placeholder").color, field.placeholder);
  }
  return found;
}"""
"""A function that returns the texts with less contrast than 4.5 to what is behind them.

The signs of keys, which are no texts, need 3. The colours are those that the browser
computes, with their opacity.
"""

SMALL = """() => [...document.querySelectorAll(
    "button, input, select, summary, nav a, canvas[tabindex], .u-over")]
  .filter((each) => each.checkVisibility({ visibilityProperty: true }))
  .map((each) => [each, each.getBoundingClientRect()])
  .filter(([, box]) => box.width < 23.9 || box.height < 23.9)
  .map(([each, box]) => `${each.outerHTML.slice(0, 60)} ${box.width}x${box.height}`)"""
"""A function that returns the targets of the pointer with a side of less than 24 px."""

TABS = """() => [...document.querySelectorAll(
    "a[href], button, input, select, summary, [tabindex='0']")]
  .filter((each) => !each.disabled)
  .filter((each) => each.checkVisibility({ visibilityProperty: true }))
  .length"""
"""A function that returns how many elements the Tab key should reach."""
