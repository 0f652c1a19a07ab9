// Brings the components of a page alive: texts beside the pointer or finger, sorted and
// searched tables, folded trees. Without it the tables are complete.
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

  // A line with a colour begins with a swatch. The tip of a figure stays in it, so that it
  // covers no other one.
  function showTip(text, x, y, colours = [], figure = null, isCode = false) {
    if (!tip.isConnected) document.body.append(tip);
    tip.replaceChildren(...text.split("\n").flatMap((line, n) => {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = colours[n];
      return [n ? "\n" : "", colours[n] ? swatch : "", line];
    }));
    tip.hidden = false;
    tip.classList.toggle("code", isCode);
    const { width, height } = tip.getBoundingClientRect();
    const box = figure?.getBoundingClientRect();
    const right = box?.right ?? page.clientWidth;
    const bottom = Math.min(box?.bottom ?? Infinity, page.clientHeight);
    const left = x + 16 + width > right ? Math.max(box?.left ?? 0, x - 16 - width) : x + 16;
    const above = box ? bottom - height : y - 12 - height;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, y + 16 + height > bottom ? above : y + 16)}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  // Returns a mark, or the element around it, that has a tip.
  function tipOf(target) {
    for (let at = target; at instanceof Element; at = at.parentElement) {
      if (at.dataset.tip) return at;
    }
    return null;
  }

  function point(event) {
    if (!(event.target instanceof Element)) return;
    const at = tipOf(event.target);
    if (!at) return hideTip();
    const isCode = at.dataset.copy !== undefined;
    showTip(at.dataset.tip, event.clientX, event.clientY, at.tipColours, at.closest("figure"), isCode);
  }

  // Keys have the tips of buttons, too, below them.
  document.addEventListener("focusin", ({ target }) => {
    const at = target.matches?.("button:focus-visible") && tipOf(target);
    if (!at) return hideTip();
    const { left, bottom } = at.getBoundingClientRect();
    showTip(at.dataset.tip, left - 16, bottom - 10, [], null, at.dataset.copy !== undefined);
  });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("pointermove", point, { passive: true });
  document.addEventListener("pointerdown", point, { passive: true });
  document.addEventListener("scroll", hideTip, true);
  page.addEventListener("pointerleave", hideTip);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });

  // ---- tables -----------------------------------------------------------------------

  function sortKey(row, column) {
    const cell = row.cells[column];
    if (cell === undefined) return "";
    const text = cell.dataset.v ?? cell.textContent.trim();
    const number = Number(text.replaceAll(",", ""));
    return text === "" || Number.isNaN(number) ? text : number;
  }

  // Made once, as it takes long.
  const TEXTS = new Intl.Collator("en", { numeric: true });

  // Numbers come before texts, and empty cells last in both directions.
  function compare(a, b, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    if (typeof a === "number") return sign * (a - b);
    return sign * TEXTS.compare(a, b);
  }

  function sortTable(head) {
    const isDown = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    sortRows(head);
  }

  // Sorts the rows by the column of a head, in its order.
  function sortRows(head) {
    const column = head.cellIndex;
    const sign = head.getAttribute("aria-sort") === "descending" ? -1 : 1;
    for (const body of head.closest("table").tBodies) {
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

  // A whole number is found only as such: 100 is not in 310 or 1000, nor in 0.100; and
  // lr=0.1 is neither in lr=0.15 nor in min_lr=0.1.
  function hasWords(text, words) {
    const numbers = text.match(/\d+(?:\.\d+)*/g) ?? [];
    return words.every((word) => {
      if (/^\d+$/.test(word)) return numbers.includes(word);
      const isTag = /.=./.test(word);
      return text.split(word).some((before, n, parts) => n + 1 < parts.length
        && !(isTag && (/[\w.]$/.test(before) || /^[a-z0-9.]/.test(parts[n + 1]))));
    });
  }

  // Hides the rows and leaves that lack a word of the search; opens what has the others.
  function search(input) {
    const scope = input.closest("[data-scope]");
    // The commas of thousands do not count.
    const plain = (text) => text.toLowerCase().replaceAll(",", "");
    const words = plain(input.value).split(/\s+/).filter(Boolean);
    let found = 0;
    let all = 0;
    for (const entry of scope.querySelectorAll("tbody tr, [data-leaf]")) {
      const text = `${entry.dataset.path ?? entry.dataset.words ?? ""} ${textOf(entry)}`;
      const fits = hasWords(plain(text), words);
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
    expand(button) {
      const isWhole = button.closest(".table").classList.toggle("whole");
      button.setAttribute("aria-pressed", isWhole);
    },
    unfold: (button) => foldAll(button, true),
    fold: (button) => foldAll(button, false),
  };

  // Tables that nearly fit have no box: to scroll to a few rows would be more work.
  const MOST_HIDDEN = 120;

  function fitTables() {
    const tables = [...document.querySelectorAll(".table")];
    for (const table of tables) table.classList.remove("fits");
    const hidden = tables.map((table) => {
      const box = table.querySelector(".scroll");
      return box.scrollHeight - box.clientHeight;
    });
    tables.forEach((table, n) => table.classList.toggle("fits", hidden[n] < MOST_HIDDEN));
  }

  addEventListener("resize", fitTables);
  document.addEventListener("toggle", fitTables, true);

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

  // Sorts and searches again what came into the page since.
  function refresh() {
    for (const head of document.querySelectorAll("th[aria-sort]")) sortRows(head);
    for (const input of document.querySelectorAll("input[data-search]")) {
      if (input.value) search(input);
    }
    fitTables();
  }

  fitTables();

  window.components = { refresh, showTip, hideTip };
})();
