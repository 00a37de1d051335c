"""The page itself: HTML, style and script in one piece, which asks nothing of any other server.

What the script shows it sets as text, never as HTML: names of workers and tenants come from elsewhere.
"""

from __future__ import annotations

from typing import Final

POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: the script reaches this gateway, and nothing reaches the script."""

PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Diptych</title>
<style>
:root { color-scheme: light dark; --line: #8884; --good: #2a7d46; --warn: #b26a00; --bad: #b3261e; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
#facts, #note { margin: 0; opacity: .75; } #note.bad { color: var(--bad); opacity: 1; }
#figures { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 1rem 0; }
#figures div { min-width: 6rem; }
#figures b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; opacity: .75; } td.n, th.n { text-align: right; }
.ready { color: var(--good); } .connecting, .draining { color: var(--warn); }
.incompatible, .gone { color: var(--bad); }
meter { width: 8rem; vertical-align: middle; }
form { margin: 1rem 0; } [hidden] { display: none; }
</style>
<h1>Diptych <span id="model"></span></h1>
<p id="facts"></p>
<p id="note">asking …</p>
<form id="login" hidden>
<label>Key with the scope admin <input id="key" type="password" autocomplete="off"></label>
<button>Show</button></form>
<div id="figures"></div>
<h2>Workers</h2><table id="workers"></table>
<h2>Tenants with live requests</h2><table id="tenants"></table>
<script>
"use strict";
const EVERY_MS = 2000, KEY = "diptych-key";
const at = id => document.getElementById(id);
const count = n => Number(n).toLocaleString("en");
let before = null;

function cell(row, content, kind, tag = "td") {
  const made = row.appendChild(document.createElement(tag));
  if (kind) made.className = kind;
  if (content instanceof Node) made.append(content); else made.textContent = content;
}
function table(id, heads, rows) {
  const fresh = document.createElement("table");
  const top = fresh.insertRow();
  for (const [name, kind] of heads) cell(top, name, kind, "th");
  for (const cells of rows) {
    const row = fresh.insertRow();
    cells.forEach((one, i) => cell(row, one.text ?? one, one.kind ?? heads[i][1]));
  }
  fresh.id = id;
  at(id).replaceWith(fresh);
}
function blocks(load) {
  if (!load.total_blocks) return "";
  const bar = document.createElement("meter");
  bar.max = load.total_blocks;
  bar.value = load.total_blocks - load.free_blocks;
  bar.title = `${count(bar.value)} of ${count(bar.max)} blocks`;
  return bar;
}
function show(status) {
  const now = performance.now(), load = status.load;
  const rate = name => before === null ? "–"
    : count(Math.max(0, Math.round((load[name] - before.load[name]) / (now - before.now) * 1000)));
  at("model").textContent = status.models.map(one => one.name).join(", ");
  at("facts").textContent = `version ${status.version} · gateway ${status.gateway_id} · configuration `
    + `${status.config_digest} · up since ${new Date(status.start_time).toLocaleString()}`;
  at("note").className = status.ready ? "" : "bad";
  at("note").textContent = (status.draining ? "draining" : status.ready ? "ready" : "not ready")
    + (status.directory_connected ? "" : " · the directory does not answer");
  at("figures").replaceChildren(...[
    ["running", count(load.running)], ["waiting", count(load.waiting)],
    ...["queued", "routing", "prefill", "decode"].map(name => [name, count(load.phases[name])]),
    ["tokens/s out", rate("generated_tokens")], ["tokens/s in", rate("prompt_tokens")],
  ].map(([name, value]) => {
    const figure = document.createElement("div"), number = document.createElement("b");
    number.textContent = value;
    figure.append(number, name);
    return figure;
  }));
  table("workers", [["worker"], ["model"], ["role"], ["state"], ["running", "n"], ["waiting", "n"],
                    ["to prefill", "n"], ["KV in use"], ["why"]],
    load.workers.map(one => [one.worker_id, one.model, one.role, {text: one.state, kind: one.state},
      count(one.load.running), count(one.load.waiting), count(one.load.waiting_tokens),
      blocks(one.load), one.detail]));
  table("tenants", [["tenant"], ["queued", "n"], ["prefill", "n"], ["decode", "n"], ["tokens", "n"]],
    load.tenants.map(one => [one.tenant || "(no keys)", count(one.phases.queued + one.phases.routing),
      count(one.phases.prefill), count(one.phases.decode), count(one.generated_tokens)]));
  before = {now, load};
}
async function ask() {
  if (!document.hidden) try {
    const key = sessionStorage.getItem(KEY), headers = key ? {authorization: `Bearer ${key}`} : {};
    const answer = await fetch("/admin/status", {headers, cache: "no-store"});
    const said = await answer.json();
    at("login").hidden = answer.status !== 401 && answer.status !== 403;
    if (answer.ok) show(said); else throw new Error(said.error.message);
  } catch (error) {
    at("note").className = "bad";
    at("note").textContent = error.message;
  }
  setTimeout(ask, EVERY_MS);
}
at("login").onsubmit = event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
};
ask();
</script>
</html>
"""
