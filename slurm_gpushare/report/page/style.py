"""The look of our pages: light, dark, on a phone and on paper."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1f23; --soft: #56606c; --rule: #dfe3e8; --card: #f4f6f8;
  --accent: #0b6bcb; --heat: #d1495b; --grey: #7f8d9c; --good: #0b6bcb; --rest: #8794a3; --bad: #b3261e;
  --c0: #0072b2; --c1: #b87a00; --c2: #009e73; --c3: #b85c8f; --c4: #3a93cc; --c5: #c04a00; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8eaed; --soft: #a9b3bf; --rule: #333a43;
  --card: #1d2228; --accent: #6db3f8; --heat: #e5697a; --grey: #9aa4b1; --good: #6db3f8; --rest: #66748a;
  --bad: #ff8a80; --c0: #4ba3dd; --c1: #e69f00; --c2: #00b386; --c3: #cc79a7; --c4: #7cc8f2; --c5: #e8743b; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem }
p.note, header p { color: var(--soft); margin: .2rem 0 1rem }
header p.result { color: var(--ink); font-size: 1.1rem; max-width: 48rem; margin: .8rem 0 1.2rem }
.figures { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: .6rem; margin: 0 }
.figures div { background: var(--card); border-radius: .5rem; padding: .7rem .8rem }
.figures dd { font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; margin: 0 }
.figures dt { color: var(--soft); font-size: .82rem; line-height: 1.3 }
.figures div { display: flex; flex-direction: column-reverse; justify-content: flex-end }
.wide { overflow-x: auto } .wide:focus-visible { outline: 2px solid var(--accent) }
svg { width: 100%; height: auto; display: block } .phone { display: none }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap }
thead th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom }
tbody th { font-weight: inherit } th:first-child { text-align: left } svg + table, div + table { margin-top: 1rem }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif } svg .tick { fill: var(--soft) }
svg .label { font-size: 12px } svg .cell { font-size: 12px; font-weight: 600 }
svg .grid { stroke: var(--rule) } svg .guide { stroke: var(--soft); stroke-dasharray: 4 4 }
svg .mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3 }
svg .middle { stroke: var(--ink); stroke-width: 2 } svg .low { fill: var(--rest) } svg .high { fill: var(--good) }
svg .dot { fill-opacity: .8 } svg .area { fill: var(--accent); fill-opacity: .15 }
svg .line { fill: none; stroke: var(--accent); stroke-width: 2 }
.key { white-space: nowrap; margin-right: .9rem }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .35rem }
.meter { display: grid; grid-template-columns: 11rem 1fr 4rem; gap: .3rem .8rem; align-items: center; font-size: .9rem }
.meter span:nth-child(3n+2) { background: var(--card); border-radius: .3rem; height: 1.1rem; overflow: hidden }
.meter b { display: block; height: 100%; background: var(--good) } .meter b.rest { background: var(--rest) }
.meter span:nth-child(3n) { text-align: right; font-variant-numeric: tabular-nums }
details { border-bottom: 1px solid var(--rule); padding: .3rem 0 } summary { cursor: pointer; font-size: .9rem }
footer { margin-top: 3rem; border-top: 1px solid var(--rule); color: var(--soft); font-size: .85rem }
footer code { overflow-wrap: anywhere }
@media (max-width: 52rem) { .figures { grid-template-columns: repeat(3, minmax(0, 1fr)) } }
@media (max-width: 36rem) { .desk { display: none } .phone { display: block }
  .meter { grid-template-columns: 1fr 3.5rem }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)) } .meter span:nth-child(3n+1) { grid-column: 1 / -1 }
  body { padding: 1rem .8rem 2rem }
  th, td { padding: .3rem .25rem; font-size: .8rem } td { white-space: normal }
  .many thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
  .many tr { display: grid; grid-template-columns: repeat(3, 1fr); padding: .3rem 0;
    border-bottom: 1px solid var(--rule) }
  .many tbody th, .many td { display: block; border: 0; text-align: left; padding: .1rem 0; overflow-wrap: anywhere }
  .many tbody th { grid-column: 1 / -1; font-weight: 600; font-size: .9rem }
  .many tbody th::before { content: attr(data-label) " "; color: var(--soft); font-weight: 400 }
  .many td[data-label]::before { content: attr(data-label); display: block; color: var(--soft); font-size: .7rem } }
@media print { body { max-width: none; font-size: 11pt } section { break-inside: avoid } .wide { overflow: visible }
  * { print-color-adjust: exact } tr { break-inside: avoid } section:has(table) { break-inside: auto }
  .all summary { display: none } .all::details-content { content-visibility: visible; display: block } }
"""
