// Draws the charts of a page: uPlot draws curves, canvases draw the rest.
//
// A page has its data in `[data-charts]`, and places to draw in: `[data-draw]` with
// a name in PAINTERS. `window.charts.refresh` draws again after the page has changed;
// what the reader has set stays.
"use strict";
(() => {
  const PALETTE = 12;
  // The axis of values; all pictures over steps begin here.
  const LEFT = 62;
  const RIGHT = 18;
  const FONT = '11.5px system-ui, "Segoe UI", Roboto, sans-serif';
  // A canvas needs colours without variables: an element of the page resolves them.
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  let colours = new Map();
  function colourOf(name) {
    if (!colours.has(name)) {
      probe.style.color = `var(--${name})`;
      colours.set(name, getComputedStyle(probe).color);
    }
    return colours.get(name);
  }

  // A run keeps its colour, whatever runs come later: the one that follows from its name,
  // or the next that fewest older runs have. The tab remembers the colours of runs once
  // all are read, so that a run that is older than others repaints none either.
  let seats = new Map();

  function seatAll({ names, is_whole: isWhole }) {
    seats = new Map(attempt(() => JSON.parse(sessionStorage.flaxckptColours)));
    names.forEach(seatOf);
    if (isWhole) attempt(() => sessionStorage.setItem("flaxckptColours", JSON.stringify([...seats])));
  }

  // Pages in frames may have no storage and no address.
  function attempt(act) {
    try { return act(); } catch { return null; }
  }

  function seatOf(run) {
    if (!seats.has(run)) {
      const hash = [...run].reduce((sum, letter) => (31 * sum + letter.codePointAt(0)) % 9973, 7);
      const order = Array.from({ length: PALETTE }, (_, n) => (hash + n) % PALETTE);
      const taken = (seat) => [...seats.values()].filter((each) => each === seat).length;
      seats.set(run, order.reduce((a, b) => (taken(b) < taken(a) ? b : a)));
    }
    return seats.get(run);
  }

  const number = (value) => (value === null ? "not finite" : String(value));
  // One formatter: toLocaleString makes one each time.
  const whole = new Intl.NumberFormat("en").format;
  const ordered = (values) => [...values].sort((a, b) => a - b);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function create(tag, given = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name in made) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  // ---- what the reader has set --------------------------------------------------------

  const view = { range: null, isTime: false, smooth: 0, log: new Map(), hidden: new Set(), open: new Set() };
  // What the page describes.
  let data = null;
  // All its steps, ascending.
  let saved = [];
  // The first and the last step.
  let extent = [0, 1];
  // What is drawn, each with `draw`.
  let drawn = [];

  const shownRange = () => view.range ?? extent;

  // ---- the axis: steps, or the time since the first save ------------------------------

  // Milliseconds; a count of one unit is small, but not below 2 from minutes on.
  const TIMES = [[864e5, " d"], [36e5, " h"], [6e4, " min"], [1e3, " s"], [1, " ms"]];
  const timeUnit = (time) => TIMES.find(([size]) => time >= (size > 1e3 ? 2 : 1) * size) ?? TIMES[4];

  function duration(secs) {
    const [size, unit] = timeUnit(1e3 * secs);
    return Number((1e3 * secs / size).toPrecision(3)) + unit;
  }

  // Several runs have several times at a step: their lines are over times then.
  const isOverTimes = () => view.isTime && data.runs;
  const count = (step) => (isOverTimes() ? duration(step / 1e3) : whole(step));
  const shownStep = (step) => (isOverTimes() ? "after " : "step ") + count(step);
  const rangeText = () => (view.range
    ? (isOverTimes() ? "" : "steps ") + view.range.map(count).join(" to ") : "all steps");

  // Maps a value as an ascending list leads to another, linearly between entries.
  function lead(from, to, value) {
    let [low, high] = [0, from.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (from[middle] > value) high = middle;
      else low = middle;
    }
    return to[low] + (value - from[low]) * (to[high] - to[low]) / (from[high] - from[low] || 1);
  }

  // The place of a step on the axis of a run, and the step at a place.
  const warp = (from, to) => (at) => (
    view.isTime && data.steps ? lead(data.steps[from], data.steps[to], at) : at);
  const onAxis = warp("x", "t");
  const toStep = warp("t", "x");

  // Returns the places of an axis in the shown range, all in one unit, with their texts.
  function ticks(width) {
    const [first, last] = shownRange().map(onAxis);
    const [unit, sign] = view.isTime ? timeUnit(last - first)
      : last >= 1e6 ? [1e6, "M"] : last >= 1e4 ? [1e3, "k"] : [1, ""];
    const least = Math.max(view.isTime ? 0 : 1, (last - first) / width * 60) / unit || 1;
    const power = 10 ** Math.floor(Math.log10(least));
    const by = power * [1, 2, 5, 10].find((each) => each * power >= least);
    const found = [];
    for (let n = Math.ceil(first / unit / by); n * by * unit <= last; n += 1) {
      found.push([toStep(n * by * unit), whole(n * by) + (n ? sign : "")]);
    }
    return found;
  }
  const isShown = (step) => step >= shownRange()[0] && step <= shownRange()[1];

  // The place in `saved` of the step nearest to a place between steps.
  const nearest = (place) => placeIn({ x: saved }, clamp(place, ...extent));

  // Shows a part of the steps, from a saved step to another: none is cut off.
  function setRange(range) {
    const end = saved.length - 1;
    let [from, to] = range ? ordered(range.map(nearest)) : [0, end];
    if (from === to) [from, to] = [Math.max(from - 1, 0), Math.min(to + 1, end)];
    view.range = from <= 0 && to >= end ? null : [saved[from], saved[to]];
    showRange();
    redraw();
    const step = pointed;
    // The pointer is at another one now.
    hideStep();
    window.components.hideTip();
    // The curves change their scales in a microtask.
    if (step !== null && isShown(step)) queueMicrotask(() => showStep(step));
    remember();
  }

  // + and - zoom around a step, or the middle of the range; Escape shows all steps.
  function zoomBy(event, given) {
    const [first, last] = shownRange();
    const half = (last - first) * { "+": 0.25, "-": 1 }[event.key];
    const middle = given ?? (first + last) / 2;
    if (half) setRange([middle - half, middle + half]);
    else if (event.key === "Escape") setRange(null);
    else return;
    event.preventDefault();
  }

  function redraw() {
    for (const each of drawn) each.draw();
  }

  function rebuild() {
    extent = findExtent();
    for (const each of drawn) each.build?.();
  }

  // ---- the address --------------------------------------------------------------------

  // The range, the chosen step and the controls with `data-address` are in the fragment:
  // `#steps=100-200&step=150`. Other fragments are links to sections, which change neither.
  const FRAGMENT = /^#?((steps=\d+-\d+|step=\d+|(rank|group|search|axis)=[^&]*)(&|$))*$/;
  let remembering = null;

  const controls = () => [...document.querySelectorAll("[data-address]")];

  function fragment() {
    const range = view.range && `steps=${view.range.join("-")}`;
    const set = controls().filter((each) => each.value)
      .map((each) => `${each.dataset.address}=${encodeURIComponent(each.value)}`);
    const parts = [range, chosen !== null && `step=${chosen}`, ...set].filter(Boolean);
    return parts.length ? `#${parts.join("&")}` : "";
  }

  function writeAddress(how) {
    const old = FRAGMENT.test(location.hash) ? location.hash : "";
    if (fragment() === old) return;
    attempt(() => history[how](history.state, "", fragment() || location.pathname + location.search));
  }

  // While a range is dragged, only its last state becomes an entry of the history.
  function remember() {
    clearTimeout(remembering);
    remembering = setTimeout(() => writeAddress("pushState"), 200);
  }

  function recall() {
    if (data === null || !FRAGMENT.test(location.hash)) return;
    const given = new URLSearchParams(location.hash.slice(1));
    for (const each of controls()) {
      const value = given.get(each.dataset.address) ?? "";
      if (each.value === value) continue;
      each.value = value;
      each.dispatchEvent(new Event(each.localName === "select" ? "change" : "input", { bubbles: true }));
    }
    // Without a range in the address or now, all is drawn already.
    if (given.has("steps") || view.range) setRange(given.get("steps")?.split("-").map(Number));
    chooseStep(given.has("step") ? Number(given.get("step")) : null);
    clearTimeout(remembering);
    writeAddress("replaceState");
  }

  for (const kind of ["change", "input"]) {
    document.addEventListener(kind, ({ target }) => {
      const address = target.dataset?.address;
      if (address) remember();
      if (address !== "axis" || kind === "input") return;
      view.isTime = target.value !== "";
      view.range = null;
      repaint();
    });
  }

  addEventListener("popstate", recall);

  // Hides the rows of other steps, and says which steps are shown.
  function showRange() {
    for (const row of document.querySelectorAll("tr[data-step]")) {
      row.classList.toggle("outside", view.range !== null && !isShown(Number(row.dataset.step)));
    }
    const output = document.querySelector("output.range");
    if (!output) return;
    output.textContent = rangeText();
    document.querySelector("[data-action=all-steps]").disabled = view.range === null;
  }

  // ---- curves -------------------------------------------------------------------------

  // The sign of a state of steps, or of an event, its colour and its meaning.
  const STATES = {
    b: ["●", "best", "the best"], k: ["●", "behind", "kept"], g: ["○", "behind", "would be deleted"],
    d: ["●", "soft", "deleted since"], x: ["●", "bad", "damaged, or not readable"],
  };
  const EVENTS = {
    stopped: ["■", "bad", "the process ended"], resumed: ["▲", "link", "resumed"],
    preempted: ["■", "link", "preempted"], fell_back: ["◆", "link", "an older step was restored"],
    failed: ["×", "bad", "a save failed"], found_damaged: ["▼", "bad", "found damaged"],
    found_good: ["△", "link", "found good"], diverged: ["‼", "bad", "not finite from here on"],
  };

  // Where a key leads from one of so many places; NaN for other keys.
  const moved = (key, at, count) => clamp(
    { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[key] ?? NaN, 0, count - 1,
  );

  // What became of a step: of a deleted one also why.
  function fateOf(step, state) {
    const why = state === "d" && (data.steps?.why[step] ?? data.steps?.why[""]);
    return STATES[state][2] + (why ? `: ${why}` : "");
  }

  // Averages exponentially, without a bias to the first value.
  function smoothen(values, share) {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  }

  // A figure with curves over steps: `lines` have name, x, y, state, colour and width.
  class Curves {
    constructor(name, { height, unit = "" }) {
      this.name = name;
      this.unit = unit;
      this.height = height;
      this.output = create("output");
      this.facts = create("span", { className: "facts" });
      this.log = create("button", {
        type: "button", textContent: "log", "data-action": "log-axis",
        title: "Logarithmic axis", onclick: () => this.toggleLog(),
      });
      const reading = create("span", { className: "reading" }, this.facts, this.output);
      const caption = create(
        "figcaption", {}, create("strong", { textContent: name }), reading, this.log,
      );
      this.place = create("div", { className: "plot" });
      this.figure = create("figure", { "data-metric": name }, caption, this.place);
      this.plot = null;
    }

    toggleLog() {
      view.log.set(this.name, !this.isLog);
      this.update(this.given, this.facts.textContent);
    }

    update(lines, facts = "") {
      this.given = lines;
      this.facts.textContent = facts;
      const all = ordered(lines.flatMap((line) => line.y).filter((value) => value !== null));
      this.log.hidden = !(all[0] > 0) || all.length < 2;
      // A few large values would hide how the others differ. Of seconds, large ones matter.
      const isWide = all.at(-1) > (this.unit ? 100 : 10) * all[all.length >> 1];
      this.isLog = !this.log.hidden && (view.log.get(this.name) ?? isWide);
      this.log.setAttribute("aria-pressed", this.isLog);
      this.build();
    }

    // Smoothed curves are drawn over faint ones of the values.
    table() {
      const joined = uPlot.join(this.lines.map((line) => [line.x, line.y]));
      if (view.smooth === 0) return joined;
      const smooth = joined.slice(1).map((values) => smoothen([...values], view.smooth));
      return [...joined, ...smooth];
    }

    series() {
      const styled = (alpha, width) => this.lines.map((line) => ({
        stroke: line.colour, width: line.width ?? width, alpha: alpha ?? line.alpha, spanGaps: true,
        show: !view.hidden.has(line.name), points: { show: line.x.length < 2 },
      }));
      return [{}, ...(view.smooth ? [...styled(0.3, 1.8), ...styled(1, 2.2)] : styled(undefined, 1.8))];
    }

    build() {
      this.lines = [...this.given, ...meansOf(this.given)];
      this.figure.hidden = this.lines.every((line) => view.hidden.has(line.name));
      if (!this.place.isConnected || this.place.clientWidth === 0) return;
      const grid = { stroke: colourOf("faint"), width: 1 };
      const axis = { stroke: colourOf("soft"), font: FONT, grid, ticks: { ...grid, size: 4 } };
      this.plot?.destroy();
      this.plot = new uPlot({
        width: this.place.clientWidth,
        height: this.height,
        padding: [10, RIGHT, 0, 0],
        legend: { show: false },
        cursor: {
          drag: { x: true, y: false, setScale: false },
          // A drag is of one curve: the others follow its range afterwards.
          sync: {
            key: "steps", setSeries: false, filters: { pub: (type) => /move|leave/.test(type) },
          },
          points: { size: 9 },
          y: false,
        },
        scales: {
          x: { time: false, range: () => shownRange(), distr: 100, fwd: onAxis, bwd: toStep },
          // Not up to the next power of ten.
          y: this.isLog ? { distr: 3, range: (_, low, high) => (low ? [+(0.9 * low).toPrecision(2), 1.1 * high] : [1, 10]) } : {},
        },
        axes: [
          {
            ...axis, size: 26, gap: 4, values: () => this.ticks.map((each) => each[1]),
            splits: (plot) => (this.ticks = ticks(plot.width - LEFT - RIGHT)).map((each) => each[0]),
          },
          { ...axis, size: LEFT, gap: 4, values: (_, at) => shortValues(at) },
        ],
        series: this.series(),
        hooks: {
          setSelect: [(plot) => this.zoom(plot)],
          setCursor: [(plot) => this.read(plot)],
          draw: [(plot) => this.mark(plot)],
        },
      }, this.table(), this.place);
      const over = this.plot.over;
      over.tabIndex = 0;
      over.setAttribute("role", "img");
      over.setAttribute("aria-label", `${this.name} over steps: ${this.facts.textContent}`);
      over.ondblclick = () => setRange(null);
      over.onpointermove = over.onpointerdown = (event) => this.tip(event.offsetX, event.offsetY);
      over.onkeydown = (event) => this.move(event);
      over.onclick = (event) => this.choose(this.runAt(event.offsetX, event.offsetY));
    }

    draw() {
      if (this.plot?.width !== this.place.clientWidth) this.build();
      // Scales follow the range.
      else this.plot.setData(this.plot.data);
    }

    zoom(plot) {
      const { left, width } = plot.select;
      if (width < 4) return;
      const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      setRange(range);
    }

    // Returns the lines at the step nearest to a place of the pointer, the highest first,
    // with their values and texts. A run that did not save there has its nearest step.
    readAt(index) {
      const step = this.plot.data[0][index];
      return this.lines.flatMap((line) => {
        if (view.hidden.has(line.name)) return [];
        const at = placeIn(line, step);
        if (at < 0) return [];
        const value = line.y[at];
        const state = line.state?.[at];
        const other = isOverTimes() || line.x[at] !== step ? ` at step ${whole((line.steps ?? line.x)[at])}` : "";
        const text = number(value) + this.unit + other + (state ? `, ${fateOf(step, state)}` : "");
        return [{ line, value, text: this.lines.length > 1 ? `${line.name}: ${text}` : text }];
      }).sort((a, b) => b.value - a.value);
    }

    // Returns the run whose value at the nearest step is at a place, of several runs.
    runAt(x, y) {
      const step = this.plot.data[0][this.plot.posToIdx(x)];
      const shown = data.runs ? this.given.filter((line) => !view.hidden.has(line.name)) : [];
      // NaN without a value.
      const far = shown.map((line) => (
        Math.abs(this.plot.valToPos(line.y[placeIn(line, step)], "y") - y)));
      const least = Math.min(...far.filter((each) => each < 16));
      return shown[far.indexOf(least)];
    }

    tip(place, height) {
      const run = this.runAt(place, height);
      this.plot.over.classList.toggle("opens", run !== undefined);
      const index = this.plot.posToIdx(place);
      const step = this.plot.data[0][index];
      if (step === undefined) return;
      const found = this.readAt(index);
      if (this.lines.length < 2) {
        this.plot.over.dataset.tip = `${this.name}\nstep ${whole(step)}: ${found[0]?.text ?? "none"}`;
        return;
      }
      // Of many lines, those around the pointer.
      const above = found.filter((each) => each.value > this.plot.posToVal(height, "y")).length;
      const from = found.length > 12 ? clamp(above - 5, 0, found.length - 10) : 0;
      const shown = found.length > 12 ? found.slice(from, from + 10) : found;
      const below = found.length - from - shown.length;
      const rows = [
        [`${this.name}, ${shownStep(step)}`], ...(from ? [[`${from} higher`]] : []),
        ...shown.map((each) => [each.text, each.line.colour]),
        ...(below ? [[`${below} lower`]] : []), ...(run ? [[`A click opens ${run.name}`]] : []),
      ];
      this.plot.over.tipColours = rows.map((row) => row[1]);
      this.plot.over.dataset.tip = rows.map((row) => row[0]).join("\n");
    }

    read(plot) {
      const index = plot.cursor.idx;
      // None while the pointer is elsewhere.
      const step = plot.cursor.left < 0 ? null : plot.data[0][index] ?? null;
      const texts = step === null ? [] : this.readAt(index).map((each) => each.text);
      // Of runs, the tip has them.
      const values = data.runs ? "" : `: ${texts.join(", ")}`;
      this.output.textContent = texts.length ? shownStep(step) + values : "";
      // The line is at a step, never between two. The cursor itself stays at the pointer:
      // a click would count as a drag.
      const line = plot.over.querySelector(".u-cursor-x");
      if (line && step !== null) line.style.transform = `translate(${plot.valToPos(step, "x")}px, 0)`;
      markLayers(step);
    }

    // Moves from curve to curve at the step of the cursor, the highest first.
    pick(by) {
      const steps = this.plot.data[0];
      const index = this.plot.cursor.idx ?? steps.length - 1;
      const there = this.readAt(index).filter((each) => each.value !== null && !each.line.low);
      if (!there.length) return;
      showStep(steps[index]);
      const at = there.findIndex((each) => each.line === this.picked) + by;
      const { line, value } = there[clamp(at, 0, there.length - 1)];
      this.picked = line;
      const { left, top } = this.plot.over.getBoundingClientRect();
      window.components.showTip(
        `${line.name}, ${shownStep(steps[index])}: ${value}\nEnter opens it`,
        left + this.plot.valToPos(steps[index], "x"), top + this.plot.valToPos(value, "y"), [line.colour], this.figure,
      );
    }

    // The arrow keys move the cursor, and between runs; + and - zoom, Escape shows all steps.
    move(event) {
      const steps = this.plot.data[0];
      const inside = [...steps.keys()].filter((n) => isShown(steps[n]));
      const at = inside.indexOf(this.plot.cursor.idx ?? -1);
      const next = inside[moved(event.key, at, inside.length)];
      if (next !== undefined) showStep(steps[next]);
      else if (data.runs && event.key === "ArrowUp") this.pick(-1);
      else if (data.runs && event.key === "ArrowDown") this.pick(1);
      else if (event.key === "Enter") this.choose(this.picked);
      else return zoomBy(event, steps[this.plot.cursor.idx]);
      event.preventDefault();
    }

    // Opens a run; without one, the actions are about the step of the cursor.
    choose(run) {
      if (run) return openRun(run.name);
      const step = this.plot.data[0][this.plot.cursor.idx];
      if (step !== undefined) chooseStep(step);
    }

    // Draws a mark for each step: kept, deleted, best or damaged.
    mark(plot) {
      const context = plot.ctx;
      const unit = devicePixelRatio;
      context.save();
      if (this.hasEvents) drawEvents(plot);
      for (const line of this.lines) if (line.low) shade(plot, line);
      for (const line of this.lines) {
        if (!line.state || view.hidden.has(line.name)) continue;
        const inside = line.x.filter(isShown).length;
        line.x.forEach((x, n) => {
          const value = line.y[n];
          const state = line.state[n];
          if (value === null || !isShown(x)) return;
          const isStrong = state === "b" || state === "x";
          if (inside > 250 && !isStrong) return;
          const left = plot.valToPos(x, "x", true);
          const top = plot.valToPos(value, "y", true);
          context.beginPath();
          context.arc(left, top, (isStrong ? 5 : state === "d" ? 2.4 : 3.4) * unit, 0, 2 * Math.PI);
          context.fillStyle = colourOf(state === "g" ? "card" : STATES[state][1]);
          context.strokeStyle = colourOf(state === "g" ? "behind" : "card");
          context.lineWidth = 1.5 * unit;
          context.fill();
          context.stroke();
        });
      }
      context.restore();
    }
  }

  // Returns the mean of each group of runs that are shown, at the steps that all have.
  function meansOf(lines) {
    return (data.runs?.groups ?? []).flatMap(([group, runs]) => {
      const found = lines.filter((line) => runs.includes(line.name) && !view.hidden.has(line.name));
      if (found.length < 2) return [];
      const x = found[0].x.filter((step) => found.every((line) => line.x.includes(step)));
      const values = x.map((step) => found.map((line) => line.y[line.x.indexOf(step)]));
      return [{
        name: `${group}, mean of ${found.length}`, x, colour: found[0].colour, width: 3,
        y: values.map((each) => Number((each.reduce((a, b) => a + b) / each.length).toPrecision(6))),
        low: values.map((each) => Math.min(...each)), high: values.map((each) => Math.max(...each)),
      }];
    });
  }

  // Fills what is between the lowest and the highest run of a group.
  function shade(plot, { x, low, high, colour }) {
    const context = plot.ctx;
    const shown = [...x.keys()].filter((n) => isShown(x[n]));
    const go = (value, n) => context.lineTo(plot.valToPos(x[n], "x", true), plot.valToPos(value, "y", true));
    context.beginPath();
    for (const n of shown) go(low[n], n);
    for (const n of shown.reverse()) go(high[n], n);
    context.fillStyle = colour;
    context.globalAlpha = 0.16;
    context.fill();
    context.globalAlpha = 1;
  }

  // Draws a line through each restart, and shades what is after a divergence.
  function drawEvents(plot) {
    const { left, top, width, height } = plot.bbox;
    const context = plot.ctx;
    for (const [step, kind] of data.events) {
      if (!isShown(step) || !/resumed|diverged/.test(kind)) continue;
      const x = plot.valToPos(step, "x", true);
      context.strokeStyle = context.fillStyle = colourOf(EVENTS[kind][1]);
      context.globalAlpha = 0.08;
      if (kind === "diverged") context.fillRect(x, top, left + width - x, height);
      context.globalAlpha = 0.7;
      context.setLineDash([4, 4]);
      context.lineWidth = devicePixelRatio;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
  }

  // The place in a line that is nearest to one on the axis; -1 beyond the ends of the line.
  function placeIn({ x }, at) {
    if (!(at >= x[0] && at <= x.at(-1))) return -1;
    return x.reduce((best, each, n) => (Math.abs(each - at) < Math.abs(x[best] - at) ? n : best), 0);
  }

  // All values of a linear axis with an exponent, or none.
  function shortValues(values) {
    const most = Math.max(...values.map(Math.abs));
    const least = most >= 1e5 || most < 1e-3 ? Infinity : 1e-4;
    return values.map((value) => {
      if (value === null) return "";
      const short = Number(value.toPrecision(5));
      return String(short && Math.abs(short) < least ? short.toExponential() : short);
    });
  }

  // The step that a row, a key or a mark shows in all curves.
  let pointed = null;

  function showStep(step) {
    pointed = step ?? null;
    for (const each of drawn) {
      const plot = each.plot;
      if (!plot || step === undefined) continue;
      const left = plot.valToPos(step, "x");
      plot.setCursor({ left, top: plot.bbox.height / 2 / devicePixelRatio }, false, false);
      each.read(plot);
    }
  }

  // Draws a line through all layers at a step; none at null.
  function markLayers(step) {
    const layer = drawn.find((each) => each.row);
    const at = step === null ? -9 : layer?.scale(layer.canvas.clientWidth, shownRange())(step);
    layer?.row.parentElement.style.setProperty("--at", `${at}px`);
  }

  function hideStep() {
    pointed = null;
    markLayers(null);
    for (const each of drawn) {
      each.plot?.setCursor({ left: -10, top: -10 }, false, false);
      if (each.output) each.output.textContent = "";
    }
  }

  document.addEventListener("pointermove", (event) => {
    if (!(event.target instanceof Element) || event.target.closest(".plot, .lanes")) return;
    const row = event.target.closest("tr[data-step]");
    if (row) showStep(Number(row.dataset.step));
    else hideStep();
  }, { passive: true });

  // ---- lanes and the brush ------------------------------------------------------------

  // A canvas over steps, which draws again as its width changes; with `move`, for keys.
  class Strip {
    constructor(className, height, label) {
      const keys = this.move && { tabIndex: 0, onkeydown: (event) => this.move(event) };
      const role = keys ? "slider" : "img";
      this.canvas = create("canvas", { className, role, "aria-label": label, ...keys });
      this.height = height;
    }

    // Returns a context for coordinates in CSS pixels, and the width.
    begin() {
      const width = this.canvas.clientWidth;
      const unit = devicePixelRatio;
      this.canvas.width = width * unit;
      this.canvas.height = this.height * unit;
      this.canvas.style.height = `${this.height}px`;
      const context = this.canvas.getContext("2d");
      context.scale(unit, unit);
      context.font = FONT;
      context.textBaseline = "middle";
      return [context, width];
    }

    // Returns where the steps begin: after names of so many letters.
    left(width) {
      return clamp(7 * (this.letters ?? 0), LEFT, Math.max(150, width / 3));
    }

    // Returns a function from a step to a place, for a range of steps.
    scale(width, range) {
      const left = this.left(width);
      const [first, last] = range.map(onAxis);
      return (step) => left + (onAxis(step) - first) / (last - first || 1) * (width - left - RIGHT);
    }

    stepAt(x, range) {
      const width = this.canvas.clientWidth;
      const left = this.left(width);
      const [first, last] = range.map(onAxis);
      return toStep(first + clamp((x - left) / (width - left - RIGHT), 0, 1) * (last - first));
    }
  }

  // The steps under a picture, as the curves have them.
  class Axis extends Strip {
    draw() {
      const [context, width] = this.begin();
      const place = this.scale(width, shownRange());
      context.fillStyle = colourOf("soft");
      context.textAlign = "center";
      for (const [at, text] of ticks(width - this.left(width) - RIGHT)) {
        context.fillRect(place(at), 0, 1, 4);
        context.fillText(text, place(at), 13);
      }
    }
  }

  // A list of signs and their meanings; a line of a chart has a swatch as its sign.
  function key(entries) {
    return create("ul", { className: "legend" }, ...entries.map(([sign, colour, meaning]) => {
      const mark = create("span", { className: sign ? "sign" : "swatch", textContent: sign });
      mark.style[sign ? "color" : "background"] = `var(--${colour})`;
      return create("li", {}, mark, meaning);
    }));
  }

  // What is in the lanes and on the first curve of this run.
  function keyOfTrack() {
    const { steps, events, saves } = data;
    const states = Object.keys(STATES).filter((state) => steps.state.includes(state));
    const kinds = Object.keys(EVENTS).filter((kind) => events.some((each) => each[1] === kind));
    const entries = [...states.map((state) => STATES[state]), ...kinds.map((kind) => EVENTS[kind])];
    const longest = longestStall(saves);
    if (longest) entries.push(["▮", "blocked", `training waited, ${duration(longest)} at most`]);
    return key(entries);
  }

  const longestStall = (saves) => Math.max(0, ...saves.blocked);

  class Lanes extends Strip {
    constructor() {
      super("lanes", 0, "Steps, events and stalls of saves: the arrow keys move between them");
      this.canvas.onpointermove = (event) => this.tip(event.offsetX, event.offsetY);
      this.canvas.onclick = () => this.at !== undefined && chooseStep(this.at);
    }

    draw() {
      const { steps, events, saves } = data;
      const longest = longestStall(saves);
      const lanes = ["steps", events.length && "events", longest && "stalls"].filter(Boolean);
      const middle = (lane) => 15 + 22 * lanes.indexOf(lane);
      this.height = 8 + 22 * lanes.length;
      const [context, width] = this.begin();
      const place = this.scale(width, shownRange());
      context.fillStyle = colourOf("soft");
      for (const name of lanes) context.fillText(name, 2, middle(name));
      this.marks = [];
      steps.x.forEach((step, n) => {
        if (!isShown(step)) return;
        const state = steps.state[n];
        context.fillStyle = colourOf(STATES[state][1]);
        const half = /[dg]/.test(state) ? 4 : 8;
        context.fillRect(place(step) - 1, 15 - half, state === "d" ? 1.4 : 2.4, 2 * half);
        this.marks.push([place(step), 15, step, `step ${whole(step)}: ${fateOf(step, state)}`]);
      });
      context.textAlign = "center";
      // Events of a step are beside each other.
      const count = new Map();
      for (const [step, kind, text] of events) {
        if (!isShown(step)) continue;
        const x = place(step) + 11 * (count.get(step) ?? 0);
        count.set(step, (count.get(step) ?? 0) + 1);
        context.fillStyle = colourOf(EVENTS[kind][1]);
        context.fillText(EVENTS[kind][0], x, middle("events"));
        this.marks.push([x, middle("events"), step, text]);
      }
      saves.x.forEach((step, n) => {
        const secs = saves.blocked[n];
        if (!secs || !isShown(step)) return;
        const height = Math.max(1.5, 18 * secs / longest);
        context.fillStyle = colourOf("blocked");
        context.fillRect(place(step) - 1.5, middle("stalls") + 9 - height, 3, height);
        this.marks.push([place(step), middle("stalls"), step, `step ${whole(step)}: training waited ${duration(secs)}`]);
      });
    }

    // The text of the nearest mark in the lane of the pointer.
    tip(x, y) {
      const far = (mark) => Math.abs(mark[0] - x);
      this.show(this.marks.filter((mark) => Math.abs(mark[1] - y) < 11 && far(mark) < 14)
        .sort((a, b) => far(a) - far(b))[0]);
    }

    show(mark) {
      this.at = mark?.[2];
      if (mark) this.canvas.dataset.tip = mark[3];
      else delete this.canvas.dataset.tip;
      if (mark) showStep(mark[2]);
    }

    // The arrow keys move from mark to mark, of all lanes; Enter chooses the step.
    move(event) {
      const marks = this.marks.sort((a, b) => a[2] - b[2] || a[1] - b[1]);
      const at = marks.findIndex((mark) => mark[3] === this.canvas.dataset.tip);
      const mark = marks[moved(event.key, at, marks.length)];
      if (event.key === "Enter" && this.at !== undefined) chooseStep(this.at);
      else if (mark) {
        const { left, top } = this.canvas.getBoundingClientRect();
        this.show(mark);
        this.canvas.setAttribute("aria-valuetext", mark[3]);
        window.components.showTip(mark[3], left + mark[0], top + mark[1]);
      } else return;
      event.preventDefault();
    }
  }

  // All steps, small; a part of them is chosen with the pointer or with keys.
  class Brush extends Strip {
    constructor() {
      super("brush", 40, "All steps: drag to show a part of them");
      const canvas = this.canvas;
      let start;
      canvas.onpointerdown = (event) => {
        canvas.setPointerCapture(event.pointerId);
        start = this.stepAt(event.offsetX, extent);
      };
      canvas.onpointermove = (event) => {
        if (start === undefined) return;
        const range = ordered([start, this.stepAt(event.offsetX, extent)]);
        if (range[1] - range[0] > (extent[1] - extent[0]) / 200) setRange(range);
      };
      canvas.onpointerup = () => { start = undefined; };
      canvas.ondblclick = () => setRange(null);
    }

    move(event) {
      const [from, to] = shownRange().map(nearest);
      const end = saved.length - 1;
      const part = Math.max(1, Math.round((to - from) / 4));
      const by = { ArrowLeft: -part, ArrowRight: part }[event.key];
      if (by !== undefined && view.range) {
        const start = clamp(from + by, 0, end - (to - from));
        setRange([saved[start], saved[start + to - from]]);
        event.preventDefault();
      } else zoomBy(event);
    }

    draw() {
      const [context, width] = this.begin();
      const place = this.scale(width, extent);
      const [first, last] = shownRange();
      context.fillStyle = colourOf("faint");
      context.fillRect(LEFT, 0, width - LEFT - RIGHT, 40);
      context.fillStyle = colourOf("t0");
      if (view.range) context.fillRect(place(first), 0, Math.max(2, place(last) - place(first)), 40);
      const [main] = data.metrics;
      const values = main ? main.y.filter((value) => value !== null) : [];
      const low = Math.min(...values);
      const high = Math.max(...values);
      context.beginPath();
      main?.x.forEach((step, n) => {
        const value = main.y[n];
        if (value !== null) context.lineTo(place(step), 35 - 30 * (value - low) / (high - low || 1));
      });
      context.strokeStyle = colourOf("behind");
      context.stroke();
      this.canvas.setAttribute("aria-valuetext", rangeText());
    }
  }

  // ---- layers -------------------------------------------------------------------------

  // The last of the colours.
  const HEATS = 4;

  // Returns the colour of a cell of the heat map.
  function heat(cell) {
    if (cell === "!") return colourOf("bad");
    const part = parseInt(cell, 36) / 35 * HEATS;
    if (Number.isNaN(part)) return "transparent";
    const from = Math.min(Math.floor(part), HEATS - 1);
    return `color-mix(in srgb, ${colourOf(`h${from + 1}`)} ${Math.round(100 * (part - from))}%, ${colourOf(`h${from}`)})`;
  }

  function changeOf(cell) {
    if (cell === "!") return "not finite";
    if (cell === ".") return "not comparable";
    const percent = 1e-3 * 10 ** (parseInt(cell, 36) / 35 * 6);
    const bound = { 0: " or less", z: " or more" }[cell] ?? "";
    return `the norm changed by ${Number(percent.toPrecision(2))} %${bound} since the last like sample`;
  }

  // A row of the heat map: a layer at each save, with its histograms when unfolded.
  class Layer extends Strip {
    constructor(name, cells) {
      super("", 24, `Changes of ${name}`);
      this.name = name;
      this.cells = cells;
      this.ridges = create("div", { className: "ridges", hidden: true });
      this.button = create("button", {
        type: "button", className: "layer", textContent: name.slice(data.layers.shared.length), "data-tip": name, "aria-expanded": "false",
        onclick: () => this.toggle(),
      });
      this.canvas.onclick = () => this.toggle();
      this.canvas.onpointermove = (event) => this.tip(event.offsetX);
      this.row = create("li", { "data-layer": name }, this.button, this.canvas, this.ridges);
      if (view.open.has(name)) this.toggle();
    }

    // A cell lies around its save, halfway to those beside it.
    draw() {
      const [context, width] = this.begin();
      const { x, first } = data.layers;
      const place = this.scale(width, shownRange());
      x.forEach((step, n) => {
        if (!isShown(step)) return;
        context.fillStyle = heat(this.cells[n]);
        const [left, right] = [x[n - 1] ?? first, x[n + 1] ?? step].map((other) => (
          Math.round(Math.max(this.left(width), place((step + other) / 2)))));
        context.fillRect(left, 0, right - left, this.height);
      });
      if (!this.ridges.hidden) this.drawRidges();
    }

    tip(x) {
      const step = this.stepAt(x, shownRange());
      const { x: steps } = data.layers;
      const n = steps.findIndex((each, at) => (each + (steps[at + 1] ?? Infinity)) / 2 >= step);
      this.canvas.dataset.tip = `${this.name}, step ${whole(data.layers.x[n])}\n${changeOf(this.cells[n])}`;
      showStep(data.layers.x[n]);
    }

    toggle() {
      const isOpen = this.ridges.hidden;
      this.ridges.hidden = !isOpen;
      if (isOpen) view.open.add(this.name);
      else view.open.delete(this.name);
      this.button.setAttribute("aria-expanded", String(isOpen));
      if (isOpen && this.row.isConnected) this.drawRidges();
    }

    // Histograms of each leaf, one above the other, the first step at the top.
    drawRidges() {
      const leaves = data.layers.ridges.filter((leaf) => leaf.layer === this.name);
      const strips = leaves.map((leaf) => (
        new Strip("", leaf.rows.length * PITCH + 34, `Histograms of ${leaf.path}`)));
      this.ridges.replaceChildren(...leaves.map((leaf, n) => (
        create("figure", {}, create("figcaption", { textContent: leaf.path }), strips[n].canvas))));
      if (!leaves.length) this.ridges.textContent = "No histograms are in this page: too many leaves.";
      leaves.forEach((leaf, n) => drawRidge(strips[n], leaf.rows));
    }
  }

  // A blow-up would make lines of all histograms before it on an even axis: the axis is
  // then even only around 0, for a part of the narrowest one. Returns 0 for an even axis.
  function unitOf(rows) {
    const widths = rows.map((row) => row[2] - row[1]).filter(Boolean);
    const least = Math.min(...widths);
    return Math.max(...widths) > 8 * least ? Number((least / 8).toPrecision(1)) : 0;
  }

  // Pixels from one histogram to the next, which it overlaps.
  const PITCH = 17;

  function drawRidge(strip, rows) {
    const [context, width] = strip.begin();
    const finite = rows.filter((row) => row[1] !== null && row[2] !== null);
    context.fillStyle = colourOf("soft");
    if (!finite.length) return context.fillText("no finite values", 2, 20);
    const low = Math.min(...finite.map((row) => row[1]));
    const high = Math.max(...finite.map((row) => row[2]));
    const unit = unitOf(finite);
    const bend = (value) => (unit ? Math.asinh(value / unit) : value);
    const place = (value) => 54 + (bend(value) - bend(low)) / (bend(high) - bend(low) || 1) * (width - 64);
    strip.canvas.dataset.tip = unit
      ? `The widths differ much, so the axis is logarithmic, but even up to ±${shortValues([unit])[0]}`
      : "One axis for all steps; each histogram is as high as its highest bin";
    rows.forEach(([step, from, to, bins], n) => {
      const base = 18 + (n + 1) * PITCH;
      const isFinite = from !== null && to !== null;
      context.fillStyle = colourOf(isFinite ? "soft" : "bad");
      context.fillText(`${whole(step)}${isFinite ? "" : ": no finite values"}`, 2, base - 4);
      if (!isFinite) return;
      context.beginPath();
      context.moveTo(place(from), base);
      [...bins].forEach((bin, at) => {
        const value = from + (at + 0.5) / bins.length * (to - from);
        context.lineTo(place(value), base - parseInt(bin, 36) / 35 * 26);
      });
      context.lineTo(place(to), base);
      context.fillStyle = colourOf("t0");
      context.globalAlpha = 0.85;
      context.fill();
      context.globalAlpha = 1;
      context.strokeStyle = colourOf("behind");
      context.stroke();
    });
    context.fillStyle = colourOf("soft");
    const [start, end] = shortValues([low, high]);
    context.fillText(start, 54, strip.height - 8);
    context.fillText(end, width - 10 - context.measureText(end).width, strip.height - 8);
    if (unit && low < 0 && high > 0) context.fillText("0", place(0) - 3, strip.height - 8);
  }

  // ---- what is drawn where --------------------------------------------------------------

  function addCurves(place, name, height, lines, facts, unit) {
    const curves = new Curves(name, { height, unit });
    place.append(curves.figure);
    curves.update(lines, facts);
    return curves;
  }

  const addMetric = (place, metric, height) => addCurves(
    place, metric.name, height, [{ ...metric, colour: colourOf("behind") }], metric.facts,
  );

  const PAINTERS = {
    // The first metric, over lanes and a brush.
    track(place) {
      const curves = data.metrics.slice(0, 1).map((metric) => addMetric(place, metric, 250));
      for (const each of curves) each.hasEvents = true;
      const parts = [new Lanes(), !curves.length && new Axis("", 20, "Steps"), saved.length > 1 && new Brush()].filter(Boolean);
      place.append(...parts.map((part) => part.canvas), keyOfTrack());
      return [...curves, ...parts];
    },
    metrics(place) {
      return data.metrics.slice(1).map((metric) => addMetric(place, metric, 170));
    },
    saves(place) {
      const { x, blocked, behind } = data.saves;
      if (x.length < 2) return [];
      const entries = [["blocked", "training waited"], ["behind", "written in the background"]];
      const curves = addCurves(place, "Seconds of saves", 190, entries.map(([colour, name], n) => (
        { name, x, y: [blocked, behind][n], colour: colourOf(colour) })), "", " s");
      place.append(key(entries.map((entry) => ["", ...entry])));
      return [curves];
    },
    layers(place) {
      if (!data.layers) return [];
      const rows = data.layers.names.map((name, n) => new Layer(name, data.layers.cells[n]));
      const axis = new Axis("", 20, "Steps");
      place.append(create("ul", { className: "heat" }, ...rows.map((row) => row.row)), axis.canvas);
      const parts = [...rows, axis];
      const most = Math.max(...data.layers.names.map((name) => name.length));
      for (const each of parts) each.letters = most - data.layers.shared.length;
      return parts;
    },
    // A metric of each run in one picture, for all metrics.
    runs(place) {
      seatAll(data.runs);
      return data.runs.metrics.map((metric) => addCurves(
        place, metric.name, 260, metric.lines.map((each) => ({
          ...each, colour: colourOf(`p${seatOf(each.name)}`), width: each.live ? 3 : 1.6,
          alpha: data.runs.groups.length ? 0.3 : 1, state: null,
        })), data.runs.groups.length ? "the mean and the range of each group" : "",
      ));
    },
  };

  function findExtent() {
    const steps = [
      ...data.metrics.flatMap((metric) => metric.x), ...(data.steps?.x ?? []),
      ...(data.runs?.metrics ?? []).flatMap((each) => each.lines)
        .flatMap((line) => (view.hidden.has(line.name) ? [] : line.x)),
    ];
    saved = ordered(new Set(steps));
    if (saved.length > 1) return [saved[0], saved.at(-1)];
    return saved.length ? [saved[0] - 1, saved[0] + 1] : [0, 1];
  }

  let text = null;
  // The step that the actions are about.
  let chosen = null;

  // Draws what is new; charts of equal data stay as they are.
  function refresh() {
    const source = document.querySelector("[data-charts]");
    const isSame = source?.textContent === text;
    if (!source) return;
    const isFirst = data === null;
    if (!isSame) {
      text = source.textContent;
      data = { metrics: [], ...JSON.parse(text) };
      // Those with values at all steps share these.
      for (const each of [data.saves ?? {}, ...data.metrics]) each.x ??= data.steps?.x;
      if (isOverTimes()) {
        // Runs have no step at one time, and so no mean.
        data.runs.groups = [];
        for (const line of data.runs.metrics.flatMap((each) => each.lines)) {
          [line.steps, line.x] = [line.x, line.t];
        }
      }
      extent = findExtent();
      if (view.range) setRange(view.range);
    }
    const places = [...document.querySelectorAll("[data-draw]")];
    if (!isSame || places.some((place) => !place.hasChildNodes())) {
      drawn.forEach((each) => each.plot?.destroy());
      drawn = places.flatMap((place) => {
        place.replaceChildren();
        return PAINTERS[place.dataset.draw](place);
      });
    }
    showRange();
    chooseStep(chosen);
    redraw();
    if (isFirst) recall();
  }

  // ---- controls -------------------------------------------------------------------------

  document.addEventListener("input", ({ target }) => {
    if (target.matches?.("[data-smooth]")) view.smooth = Number(target.value);
    else if (target.matches?.("#all-runs [data-search]")) {
      // Runs that a search leaves out are not drawn either.
      const rows = [...document.querySelectorAll("#all-runs tr[data-run]")];
      view.hidden = new Set(rows.filter((row) => row.hidden).map((row) => row.dataset.run));
    } else return;
    rebuild();
    showSeries();
  });

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("button");
    if (button?.dataset.action === "all-steps") setRange(null);
    if (button?.dataset.series !== undefined) toggleSeries(button);
    if (button?.dataset.copy !== undefined) copy(button);
    if (button?.matches(".theme")) changeTheme();
    const row = target.closest?.("#all-runs tr[data-run], #steps tr[data-step]");
    if (!row || target.closest("a, button, summary")) return;
    if (row.dataset.step) chooseStep(Number(row.dataset.step));
    else if (!String(getSelection())) openRun(row.dataset.run);
  });

  function toggleSeries(button) {
    const name = button.dataset.series;
    if (!view.hidden.delete(name)) view.hidden.add(name);
    rebuild();
    showSeries();
  }

  function showSeries() {
    for (const each of document.querySelectorAll("button[data-series]")) {
      each.setAttribute("aria-pressed", String(!view.hidden.has(each.dataset.series)));
    }
    for (const each of document.querySelectorAll("[data-series], #all-runs tr[data-run]")) {
      const run = each.dataset.series ?? each.dataset.run;
      if (seats.has(run)) each.style.setProperty("--series", `var(--p${seatOf(run)})`);
    }
  }

  function openRun(name) {
    const rows = [...document.querySelectorAll("#all-runs tr[data-run]")];
    rows.find((row) => row.dataset.run === name)?.querySelector("a").click();
  }

  // ---- actions --------------------------------------------------------------------------

  // Makes a step the one that the actions are about; null is the one of the page.
  function chooseStep(given) {
    chosen = given;
    for (const menu of document.querySelectorAll("menu.actions")) {
      const step = given ?? Number(menu.dataset.step);
      const at = data.steps.x.indexOf(step);
      const lost = at < 0 ? ", not in this run"
        : { d: ", deleted", x: ", damaged" }[data.steps.state[at]] ?? "";
      const diverged = data.events.find((each) => each[1] === "diverged")?.[0] ?? Infinity;
      const odd = lost || (step >= diverged ? ", not finite" : "");
      const newer = data.steps.x.filter((each, n) => each > step && data.steps.state[n] !== "d");
      const count = newer.length === 1 ? `step ${newer[0]}` : `${newer.length} newer steps`;
      menu.querySelector(".chosen").textContent = `Step ${whole(step)}${odd}`;
      for (const button of menu.querySelectorAll("button")) {
        const code = button.dataset.copy;
        const pair = pairWith(step);
        const isRestore = button.dataset.restores !== undefined;
        const isMissing = (isRestore ? odd : lost) !== "" || (code.includes("{pair}") && !pair);
        button.disabled = isMissing && /\{(step|pair)\}/.test(code);
        button.dataset.tip = code.replaceAll("{step}", step).replace("{pair}", pair)
          .replace("{newer}", `deletes ${newer.slice(0, 9).join(", ") || "nothing now"}${newer[9] ? " …" : ""}`);
        if (code.includes("{newer}")) {
          const deletes = newer.length && !button.disabled ? `, deleting ${count}` : "";
          button.textContent = `Resume from here${deletes}`;
        }
      }
    }
    remember();
  }

  // A step and the newest other one that exists, the older first; empty without one.
  function pairWith(step) {
    const { x, state } = data.steps;
    const others = x.filter((each, n) => state[n] !== "d" && each !== step);
    return others.length ? ordered([step, others.at(-1)]).join(" ") : "";
  }

  async function copy(button) {
    const words = button.dataset.tip;
    const output = button.closest("menu").querySelector("output");
    try {
      await navigator.clipboard.writeText(words);
      output.textContent = `Copied: ${words}`;
      output.dataset.tip = words;
    } catch {
      delete output.dataset.tip;
      // To be copied by hand.
      output.textContent = words;
    }
  }

  // ---- size, colours and paper ------------------------------------------------------------

  // Draws all again, in the colours of now.
  function repaint() {
    colours = new Map();
    text = null;
    refresh();
    showSeries();
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  for (const event of ["beforeprint", "afterprint"]) {
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printed", event === "beforeprint");
      repaint();
    });
  }

  const THEMES = { "": "dark", dark: "light", light: "" };

  function changeTheme() {
    const { dataset } = document.documentElement;
    dataset.theme = THEMES[dataset.theme ?? ""];
    attempt(() => localStorage.setItem("flaxckpt-theme", dataset.theme));
    repaint();
  }
  document.documentElement.dataset.theme = attempt(() => localStorage.getItem("flaxckpt-theme")) ?? "";

  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(document.documentElement);
  document.addEventListener("toggle", () => redraw(), true);

  window.charts = { refresh: () => { refresh(); showSeries(); } };
  refresh();
  showSeries();
})();
