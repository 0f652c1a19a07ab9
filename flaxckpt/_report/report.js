// Brings the components of a page alive: values under the pointer or finger, log axes,
// sorted and searched tables, folded trees. Without it the page is complete.
//
// All events are handled on the document, so that fragments inserted later work, too.
// Texts are set as textContent only. The contract is in the docstring of `_report`.
"use strict";
(() => {
  const page = document.documentElement;
  page.classList.add("live");

  // ---- the tip: a text beside the pointer ------------------------------------------

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;

  function showTip(text, x, y) {
    if (!tip.isConnected) document.body.append(tip);
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 16 + width > page.clientWidth ? x - 16 - width : x + 16;
    const top = y + 16 + height > page.clientHeight ? y - 12 - height : y + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  // Returns the tip of a mark or of an element around it. A <title>, which a browser
  // would show late and again, becomes data-tip.
  function tipOf(target) {
    for (let at = target; at instanceof Element; at = at.parentElement) {
      const title = at.querySelector(":scope > title");
      if (title && at instanceof SVGElement) {
        at.dataset.tip = title.textContent;
        title.remove();
      }
      if (at.dataset.tip) return at.dataset.tip;
      if (at.matches(".picture, table, section")) return null;
    }
    return null;
  }

  // ---- curves: a cursor at the nearest step -----------------------------------------

  const KINDS = {
    k: "kept", g: "would be deleted", d: "deleted since", b: "the best",
    a: "among the best", u: "damaged, or not readable",
  };
  const parsed = new WeakMap();

  // Returns the points of a plot: data-series has "step,value,kind" for each.
  function pointsOf(plot) {
    const text = plot.dataset.series;
    let entry = parsed.get(plot);
    if (entry === undefined || entry.text !== text) {
      const points = text.split(" ").map((point) => {
        const [step, value, kind] = point.split(",");
        return { step: Number(step), value: Number(value), shown: value, kind };
      });
      entry = { text, points };
      parsed.set(plot, entry);
    }
    return entry.points;
  }

  function nearest(points, step) {
    let low = 0;
    let high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle].step < step) low = middle + 1;
      else high = middle;
    }
    const before = points[Math.max(0, low - 1)];
    return Math.abs(before.step - step) <= Math.abs(points[low].step - step)
      ? before : points[low];
  }

  const numbers = (text) => text.split(",").map(Number);

  function shapeOf(tag, attributes) {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) {
      shape.setAttribute(name, value);
    }
    return shape;
  }

  function showCursor(plot, point) {
    const [first, last] = numbers(plot.dataset.x);
    const across = last > first ? 100 * (point.step - first) / (last - first) : 50;
    const isLog = plot.closest("figure")?.classList.contains("log");
    const [low, high, bottom, top] = numbers(isLog ? plot.dataset.log : plot.dataset.y);
    const value = isLog ? Math.log10(point.value) : point.value;
    const down = bottom + (value - low) / (high - low) * (top - bottom);
    let cursor = plot.querySelector(":scope > .cursor");
    if (cursor === null) {
      cursor = shapeOf("g", { class: "cursor" });
      cursor.append(
        shapeOf("line", { y1: top, y2: bottom }), shapeOf("circle", { r: 5 }),
      );
      plot.append(cursor);
    }
    cursor.firstChild.setAttribute("x1", `${across}%`);
    cursor.firstChild.setAttribute("x2", `${across}%`);
    cursor.lastChild.setAttribute("cx", `${across}%`);
    cursor.lastChild.setAttribute("cy", down);
    plot.dataset.at = point.step;
    const reading = plot.closest("figure")?.querySelector("output");
    if (reading) reading.textContent = describe(point);
  }

  const describe = (point) =>
    `step ${point.step.toLocaleString("en")}: ${point.shown}`
    + (KINDS[point.kind] ? `, ${KINDS[point.kind]}` : "");

  function hideCursors() {
    for (const cursor of document.querySelectorAll(".plot > .cursor")) {
      const figure = cursor.closest("figure");
      cursor.remove();
      const reading = figure?.querySelector("output");
      if (reading) reading.textContent = "";
    }
  }

  // Shows the cursor in a plot and in those beside it, at the step.
  function showStep(plot, step) {
    for (const title of plot.querySelectorAll("title")) title.remove();
    const beside = plot.closest("[data-sync]")?.querySelectorAll(".plot[data-series]");
    for (const other of beside ?? [plot]) {
      showCursor(other, nearest(pointsOf(other), step));
    }
    return nearest(pointsOf(plot), step);
  }

  function stepAt(plot, clientX) {
    const { left, width } = plot.getBoundingClientRect();
    const [first, last] = numbers(plot.dataset.x);
    return first + (clientX - left) / width * (last - first);
  }

  // Shows the step of a row of a table in all curves that have it.
  function showRow(row) {
    const step = Number(row.dataset.step);
    for (const plot of document.querySelectorAll(".plot[data-series]")) {
      const point = nearest(pointsOf(plot), step);
      if (point.step === step) showCursor(plot, point);
    }
  }

  function point(event) {
    if (!(event.target instanceof Element)) return;
    const plot = event.target.closest(".plot[data-series]");
    const row = event.target.closest("tr[data-step]");
    if (plot) {
      const at = showStep(plot, stepAt(plot, event.clientX));
      showTip(`${plot.dataset.name}\n${describe(at)}`, event.clientX, event.clientY);
      return;
    }
    hideCursors();
    if (row) showRow(row);
    const text = tipOf(event.target);
    if (text) showTip(text, event.clientX, event.clientY);
    else tip.hidden = true;
  }

  function forget() {
    tip.hidden = true;
    hideCursors();
  }

  document.addEventListener("pointermove", point, { passive: true });
  document.addEventListener("pointerdown", point, { passive: true });
  document.addEventListener("scroll", () => { tip.hidden = true; }, true);
  page.addEventListener("pointerleave", forget);

  // The arrow keys move the cursor of a focused curve.
  function moveCursor(event, plot) {
    const points = pointsOf(plot);
    const at = points.findIndex((each) => each.step === Number(plot.dataset.at));
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const next = Math.min(Math.max(moves[event.key], 0), points.length - 1);
    showStep(plot, points[next].step);
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") forget();
    const plot = event.target instanceof Element
      && event.target.closest(".plot[data-series]");
    if (plot) moveCursor(event, plot);
  });

  // ---- tables -----------------------------------------------------------------------

  function sortKey(row, column) {
    const cell = row.cells[column];
    if (cell === undefined) return "";
    const text = cell.dataset.v ?? cell.textContent.trim();
    const number = Number(text.replaceAll(",", ""));
    return text === "" || Number.isNaN(number) ? text : number;
  }

  const TEXTS = new Intl.Collator("en", { numeric: true }); // slow to make

  // Numbers come before texts, and empty cells last in both directions.
  function compare(a, b, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    if (typeof a === "number") return sign * (a - b);
    return sign * TEXTS.compare(a, b);
  }

  function sortTable(head) {
    const column = head.cellIndex;
    const table = head.closest("table");
    const isDown = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const caption = table.caption;
    if (caption.textContent === "The newest first") caption.dataset.order = "";
    if ("order" in caption.dataset) {
      const order = isDown ? "descending" : "ascending";
      caption.textContent = `By ${head.textContent.trim()}, ${order}`;
    }
    const sign = isDown ? -1 : 1;
    for (const body of table.tBodies) {
      const rows = Array.from(body.rows, (row) => [sortKey(row, column), row]);
      rows.sort((a, b) => compare(a[0], b[0], sign));
      body.append(...rows.map((pair) => pair[1]));
    }
  }

  // ---- search and folds -------------------------------------------------------------

  // Returns the texts in a node with spaces between them, without closed folds.
  function textOf(node) {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    const isClosed = node.localName === "details" && !node.open;
    const parts = isClosed ? node.querySelectorAll("summary") : node.childNodes;
    return Array.from(parts, textOf).join(" ");
  }

  // A whole number is found only as such: 100 is not in 310 or 1000, nor in 0.100.
  function hasWords(text, words) {
    const numbers = text.match(/\d+(?:\.\d+)*/g) ?? [];
    return words.every((word) => (
      /^\d+$/.test(word) ? numbers.includes(word) : text.includes(word)
    ));
  }

  // Hides the rows and leaves that lack a word of the search; opens what has the others.
  function search(input) {
    const scope = input.closest("[data-scope]");
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    let all = 0;
    for (const entry of scope.querySelectorAll("tbody tr, [data-leaf]")) {
      const text = `${entry.dataset.path ?? ""} ${textOf(entry)}`.toLowerCase();
      const fits = hasWords(text, words);
      entry.hidden = !fits;
      found += fits;
      all += 1;
    }
    const branches = [...scope.querySelectorAll("[data-branch]")].reverse();
    for (const branch of branches) {
      const isEmpty = branch.querySelector("[data-leaf]:not([hidden])") === null;
      branch.hidden = words.length > 0 && isEmpty;
      const folded = branch.querySelector(":scope > details");
      if (words.length === 0) folded.open = folded.dataset.open !== undefined;
      else if (!isEmpty) folded.open = true;
    }
    const count = scope.querySelector("output.found");
    if (count) count.textContent = words.length ? `${found} of ${all}` : "";
  }

  const ACTIONS = {
    log(button) {
      const isLog = button.closest("figure").classList.toggle("log");
      button.setAttribute("aria-pressed", isLog);
      hideCursors();
    },
    expand(button) {
      const isWhole = button.closest(".table").classList.toggle("whole");
      button.setAttribute("aria-pressed", isWhole);
    },
    unfold: (button) => foldAll(button, true),
    fold: (button) => foldAll(button, false),
  };

  function foldAll(button, isOpen) {
    const scope = button.closest("[data-scope]");
    for (const each of scope.querySelectorAll("[data-branch] > details")) {
      each.open = isOpen;
    }
  }

  document.addEventListener("input", (event) => {
    if (event.target.matches?.("input[data-search]")) search(event.target);
  });

  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element)) return;
    const button = event.target.closest("button");
    if (button?.dataset.action in ACTIONS) ACTIONS[button.dataset.action](button);
    else if (button?.matches("th > .sort")) sortTable(button.parentElement);
    const link = event.target.closest("a[href^='#']");
    if (link) unfoldTarget(link.hash);
  });

  // A link to a folded section, or to a row in one, opens the section.
  function unfoldTarget(hash) {
    const target = document.getElementById(decodeURIComponent(hash.slice(1)));
    if (target) target.hidden = false;
    let at = target?.querySelector(":scope > details") ?? target;
    for (; at; at = at.parentElement) {
      if (at.localName === "details") at.open = true;
    }
  }

  if (location.hash) unfoldTarget(location.hash);
})();
