// What the page adds to the report's scripts, htmx and idiomorph: news of the run, and
// what the reader has set stays so when sections change.
"use strict";
(() => {
  // ---- news ---------------------------------------------------------------------------

  const ASK_MS = 500;
  const SAID_MS = 60_000; // how long news without damage are shown
  const LOST = "not connected: is flaxckpt ui still running?";
  const line = document.getElementById("news");
  let address = document.body.dataset.news;
  let asking = null;
  let told = -Infinity; // the time of the last news

  // Asks from time to time while the page is seen.
  async function ask() {
    clearTimeout(asking);
    if (!address || document.hidden) return;
    try {
      const reply = await fetch(address, { signal: AbortSignal.timeout(20 * ASK_MS) });
      if (reply.status === 404) location.reload(); // deleted
      else if (reply.ok) tell(await reply.json());
      else say(LOST); // such as another server on this port
    } catch {
      say(LOST);
    }
    asking = setTimeout(ask, ASK_MS);
  }

  function tell({ version, text, is_bad: isBad }) {
    const isNew = !address.endsWith(`version=${version}`);
    if (isNew && !address.endsWith("version=")) told = Date.now(); // not at the first answer
    const isOld = Date.now() - told > SAID_MS;
    say(text && (isBad || !isOld) ? text : "up to date", isBad);
    address = address.replace(/version=[\d.]*$/, `version=${version}`);
    if (isNew) showNews();
  }

  // Loads the page's data again, unless it is of this version already. While the first
  // data is still loading, this waits for it.
  let isWaiting = false;

  function showNews() {
    const shown = document.querySelector("[data-version]")?.dataset.version;
    isWaiting = shown === "";
    if (!isWaiting && !(shown && address.endsWith(`version=${shown}`))) {
      htmx.trigger(document.body, "run-changed");
    }
  }

  document.addEventListener("htmx:afterSwap", () => {
    if (isWaiting) showNews();
  });

  function say(text, isBad = text === LOST) {
    line.textContent = text;
    line.classList.toggle("bad", isBad);
  }

  document.addEventListener("visibilitychange", ask);
  ask();

  // Says how long ago a run has saved; nothing tells whether it is still running.
  const UNITS = [["days", 86400], ["h", 3600], ["min", 60], ["s", 0]];

  function showAges() {
    for (const time of document.querySelectorAll("[data-card=newest] time, #all-runs time")) {
      time.dataset.tip ??= time.textContent;
      const secs = Math.max(0, (Date.now() - Date.parse(time.dateTime)) / 1000);
      const [unit, size] = UNITS.find((each) => secs >= 2 * each[1]);
      const text = `${Math.floor(secs / (size || 1))} ${unit} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  }

  setInterval(showAges, 1000);
  document.addEventListener("htmx:afterSwap", showAges);
  showAges();

  // ---- what the reader has changed ----------------------------------------------------

  // New sections change the old ones in place. What the reader has set stays: folds,
  // searches, sorted columns, the focus, and all that charts.js has drawn.
  const KEPT = new Set(["open", "hidden", "value", "selected", "disabled", "aria-sort", "aria-pressed"]);
  const options = {
    morphStyle: "innerHTML",
    ignoreActiveValue: true,
    callbacks: {
      beforeNodeMorphed: (old) => !(old instanceof Element && old.matches("[data-draw]")),
      beforeAttributeUpdated: (name, element) =>
        !(KEPT.has(name) || (name === "class" && element.matches(".table"))),
    },
  };

  htmx.defineExtension("morph", {
    handleSwap(style, target, fragment) {
      if (style !== "morph:innerHTML") return false;
      return Idiomorph.morph(target, [...fragment.childNodes], options);
    },
  });

  // The first table of runs is ranked and grouped as the address says.
  document.addEventListener("htmx:configRequest", ({ detail }) => {
    if (detail.path !== "/runs") return;
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of ["rank", "group"]) {
      const isShown = document.querySelector(`#runs select[name=${name}]`);
      if (!isShown && given.has(name)) detail.parameters[name] = given.get(name);
    }
  });

  document.addEventListener("htmx:afterSwap", () => {
    components.refresh();
    charts.refresh();
  });

  // ---- forms --------------------------------------------------------------------------

  // The lists of steps follow the run; what is chosen stays, even if it was deleted.
  document.body.addEventListener("run-changed", async () => {
    const lists = document.querySelectorAll("form.choices select");
    if (!lists.length) return;
    const reply = await fetch(location.href).catch(() => null); // the server may end
    if (!reply?.ok) return;
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const list of lists) {
      const now = page.querySelector(`form.choices select[name="${list.name}"]`);
      if (!now) continue;
      const [chosen] = list.selectedOptions;
      list.replaceChildren(...now.children);
      if (!chosen) continue;
      const isThere = [...list.options].some((each) => each.value === chosen.value);
      if (!isThere) list.append(chosen);
      list.value = chosen.value;
    }
  });

  document.addEventListener("change", (event) => {
    const without = event.target.dataset?.without;
    const form = event.target.closest?.(without ? "form" : "form[data-submit]");
    if (without && form.elements[without]) form.elements[without].disabled = true;
    if (form) form.requestSubmit();
    else if (event.target.closest?.("form.choices")) {
      document.getElementById("result")?.setAttribute("data-outdated", "");
    }
  });

  document.addEventListener("htmx:sendError", () => say(LOST));

  // The run that the page shows was deleted: loading the page again tells so.
  document.addEventListener("htmx:responseError", (event) => {
    if (event.detail.target.id === "sections") location.reload();
  });

  // The leaf that the panel shows.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const link = event.target.closest?.(".tree a");
    if (!link) return;
    for (const other of document.querySelectorAll(".tree a[aria-current]")) {
      other.removeAttribute("aria-current");
    }
    link.setAttribute("aria-current", "true");
  });
})();
