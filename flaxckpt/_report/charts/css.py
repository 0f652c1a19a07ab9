"""Style sheets of pages and cards: light, dark, wide, narrow and printed.

The colours are from Okabe and Ito's palette for colour-blind readers.
"""

from __future__ import annotations

_LIGHT = """
color-scheme: light;
--paper: #f6f7f9; --card: #ffffff; --ink: #17202b; --soft: #55606e; --line: #d9dee5;
--faint: #edf0f4; --link: #0b5a94; --behind: #2f7fc1; --blocked: #d55e00;
--best: #b34700; --good: #00684e; --good-back: #dff3ec; --bad: #a61b1b;
--bad-back: #fdeaea; --t0: #cfe2f4; --t1: #fbdfbf; --t2: #c9eadc; --t3: #f1d3e4;
--t4: #f6efb4; --t5: #dcdcec;
"""

_DARK = """
color-scheme: dark;
--paper: #10151b; --card: #19202a; --ink: #e8edf3; --soft: #a3afbd; --line: #313c49;
--faint: #222b36; --link: #7cc0f5; --behind: #56a8e8; --blocked: #f28e44;
--best: #ffad66; --good: #5fd4ad; --good-back: #12382e; --bad: #ff9a94;
--bad-back: #45201f; --t0: #1d4b72; --t1: #70471a; --t2: #17543f; --t3: #6a3355;
--t4: #5a5216; --t5: #45456e;
"""

_VARIABLES = f"""
:root {{{_LIGHT}}}
@media (prefers-color-scheme: dark) {{:root {{{_DARK}}}}}
@media print {{:root {{{_LIGHT}}}}}
"""

_BASE = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
    sans-serif; }
header, main, footer { max-width: 1040px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: 2.1rem; line-height: 1.15; margin: 2px 0 4px; letter-spacing: -.015em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.22rem; margin: 0 0 4px; letter-spacing: -.005em; }
p { margin: 0; }
a { color: var(--link); }
code, .path, .digest { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; font-size: .86em; overflow-wrap: anywhere; }
.over { color: var(--soft); font-size: .85rem; font-weight: 600;
  text-transform: uppercase; letter-spacing: .06em; }
.path, .summary-text, .note, footer { color: var(--soft); }
.summary-text code { white-space: nowrap; }
.summary-text { max-width: 72ch; text-wrap: pretty;
  margin-bottom: 14px; overflow-wrap: anywhere; }
.note { font-size: .9rem; margin-top: 8px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 22px 24px 24px; margin: 18px 0; scroll-margin-top: 12px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 18px 0 2px;
  font-size: .92rem; }
nav a { text-decoration: none; padding: 3px 0; }
nav a:hover, nav a:focus-visible { text-decoration: underline; }
footer { font-size: .85rem; padding-bottom: 36px; }
"""

_CARDS = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  gap: 12px; margin-top: 22px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 13px 15px 12px; min-width: 0; }
.card-title { color: var(--soft); font-size: .8rem; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }
.card-value { font-size: 1.42rem; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; letter-spacing: -.01em; overflow-wrap: anywhere; }
.card-detail { color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; }
.card.good .card-value { color: var(--good); }
.card.bad { background: var(--bad-back); border-color: var(--bad); }
.card.bad .card-value { color: var(--bad); }
"""

_TABLES = """
.scroll { overflow-x: auto; margin-top: 12px; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .82rem;
  padding-bottom: 6px; }
th, td { padding: 6px 28px 6px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--faint); }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-weight: 500; border-bottom-color: var(--line);
  white-space: nowrap; }
tbody th { font-weight: 600; }
tbody th:not(.number) { font-weight: 500; overflow-wrap: anywhere; min-width: 11em; }
td:not(.number) { max-width: 30em; overflow-wrap: break-word; }
th.number, td.number { text-align: right; white-space: nowrap; }
td time { white-space: nowrap; }
tr.bad th, tr.bad td { background: var(--bad-back); }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--link); font-size: .9rem; }
.mark { display: inline-block; border: 1px solid var(--line); border-radius: 99px;
  padding: 0 9px; margin: 0 4px 2px 0; font-size: .8rem; white-space: nowrap; }
.mark.latest { border-color: var(--behind); }
.mark.best { border-color: var(--best); color: var(--best); font-weight: 600; }
.mark.damaged, .state.damaged, .state.unread { color: var(--bad); font-weight: 600; }
.state.verified, .state.whole { color: var(--good); font-weight: 600; }
.state { white-space: nowrap; }
.with-bar { display: flex; align-items: center; justify-content: flex-end; gap: 12px; }
.inline-bar { width: 130px; height: 10px; }
.inline-bar .track { fill: var(--faint); }
"""

_PICTURES = """
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--ink); font-size: 12px; }
svg .tick { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .axis-title { fill: var(--ink); font-weight: 600; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
.grid { stroke: var(--faint); stroke-width: 1; }
.baseline { stroke: var(--line); stroke-width: 1.2; }
.bar.blocked { fill: var(--blocked); }
.bar.behind { fill: var(--behind); }
.bar.failed { fill: var(--bad); }
svg .cross { fill: var(--bad); font-size: 15px; font-weight: 700; text-anchor: middle; }
.save { stroke: var(--behind); stroke-width: 1.5; stroke-opacity: .75; }
svg .happening { text-anchor: middle; font-size: 13px; fill: var(--blocked);
  paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.failed .happening { fill: var(--bad); }
.curve { fill: none; stroke: var(--behind); stroke-width: 1.8; stroke-linejoin: round; }
.point { stroke-width: 1.6; }
.point.kept { fill: var(--behind); stroke: var(--card); }
.point.goes { fill: var(--card); stroke: var(--behind); }
.point.best { fill: var(--blocked); stroke: var(--card); }
svg .best-label, svg .extreme-label { paint-order: stroke; stroke: var(--card);
  stroke-width: 3.5px; font-weight: 600; fill: var(--best); }
svg .extreme-label { font-weight: 400; fill: var(--soft); }
.gone { stroke: var(--soft); stroke-width: 1.2; stroke-opacity: .6; }
.c0 { fill: var(--t0); } .c1 { fill: var(--t1); } .c2 { fill: var(--t2); }
.c3 { fill: var(--t3); } .c4 { fill: var(--t4); } .c5 { fill: var(--t5); }
.treemap g:hover .tile { stroke: var(--ink); stroke-width: 1.5; }
svg .group-name { font-weight: 650; }
svg .tile-size { fill: var(--ink); opacity: .82; font-size: 11px; }
.narrow { display: none; }
.figures { display: grid; gap: 22px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 280px), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 420px; }
figcaption { font-weight: 600; font-size: .92rem; margin-bottom: 2px;
  overflow-wrap: anywhere; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px;
  margin: 0 0 10px; padding: 0; font-size: .82rem; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 6px; }
.swatch { width: 13px; height: 13px; flex: none; }
.lineage { list-style: none; margin: 0; padding: 0; }
.lineage > li { position: relative; border-left: 2px solid var(--line);
  padding: 0 0 18px 20px; margin-left: 6px; overflow-wrap: anywhere; }
.lineage > li::before { content: ""; position: absolute; left: -7px; top: 6px;
  width: 12px; height: 12px; border-radius: 50%; background: var(--card);
  border: 2px solid var(--behind); }
.lineage > li.here { border-left-color: transparent; padding-bottom: 0; }
.lineage > li.here::before { background: var(--behind); }
.lineage ul { margin: 4px 0 0; padding-left: 18px; }
.lineage p { color: var(--soft); }
"""

_MEDIA = """
@media (max-width: 620px) {
  header, main, footer { padding-left: 12px; padding-right: 12px; }
  header { padding-top: 22px; }
  h1 { font-size: 1.6rem; }
  section { padding: 16px 14px 18px; border-radius: 10px; margin: 12px 0; }
  .cards { grid-template-columns: 1fr 1fr; gap: 8px; }
  .wide { display: none; }
  .narrow { display: block; }
}
@media print {
  body { background: none; font-size: 11pt; }
  nav, summary { display: none; }
  section, .card { break-inside: avoid; border-color: #bbb; }
}
"""

PAGE = _VARIABLES + _BASE + _CARDS + _TABLES + _PICTURES + _MEDIA
"""The style sheet of a page."""
