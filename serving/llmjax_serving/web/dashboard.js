"use strict";
// Draws /dashboard/state once a second. Whatever the server says is put in as text, never as HTML.

const PERIOD = 1000;
const HISTORY = 120;
const OWNED = 3; // cells from here on are of a sequence that runs, as in llmjax/engine/snapshot.py

const byId = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const seconds = (s) => (s < 1 ? `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(1)} s`);
// Those that came one after the other are far apart on the wheel of colours.
const hue = (seq) => `hsl(${(137.508 * seq.arrival + 20) % 360} 60% 52%)`;

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// What is drawn over time: a name, how it is shown, and its value from two states.

const rate = (name) => (now, before) =>
  (now.totals[name] - before.totals[name]) / Math.max(1e-3, now.time - before.time);
const mean = (name) => (now, before) => {
  const count = now.totals[`${name}_count`] - before.totals[`${name}_count`];
  return count > 0 ? (now.totals[`${name}_sum`] - before.totals[`${name}_sum`]) / count : null;
};
const CHARTS = [
  ["generation tokens/s", number, rate("generation_tokens_total")],
  ["prompt tokens/s", number, rate("prompt_tokens_total")],
  ["time to first token", seconds, mean("time_to_first_token_seconds")],
  ["inter-token latency", seconds, mean("inter_token_latency_seconds")],
  ["running", number, (now) => now.stats.num_running],
  ["waiting", number, (now) => now.stats.num_waiting],
  ["pages in use", percent, (now) => now.stats.pages_used / now.num_pages],
  ["preemptions", number, (now) => now.stats.num_preemptions],
].map(([name, show, read]) => ({ name, show, read, points: [] }));

function makeCharts() {
  for (const chart of CHARTS) {
    const box = make("div");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    chart.output = make("output", "-");
    svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 36`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.append(chart.line);
    box.append(make("h3", chart.name), chart.output, svg);
    byId("charts").append(box);
  }
}

function drawCharts(now, before) {
  for (const chart of CHARTS) {
    const last = chart.points.at(-1) ?? null;
    // Where nothing came there is nothing to tell: the line goes on as it was.
    const value = chart.read(now, before) ?? last;
    chart.points.push(value);
    chart.points.splice(0, chart.points.length - HISTORY);
    chart.output.textContent = value === null ? "-" : chart.show(value);
    const most = Math.max(...chart.points.map((v) => v ?? 0), 1e-9);
    const start = HISTORY - chart.points.length;
    const places = chart.points.map((v, i) => (v === null ? "" : `${start + i},${34 - (32 * v) / most}`));
    chart.line.setAttribute("points", places.filter(Boolean).join(" "));
  }
}

// The page map

let shown = null;

function grid(cells, width) {
  const side = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * 260) / cells.length))));
  const columns = Math.max(1, Math.floor(width / side));
  return { side, columns, rows: Math.ceil(cells.length / columns) };
}

function drawMap(state) {
  const canvas = byId("map"), style = getComputedStyle(document.documentElement);
  const { cells } = state.pages, width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  const { side, columns, rows } = grid(cells, width);
  canvas.style.height = `${rows * side}px`;
  canvas.width = width * scale;
  canvas.height = rows * side * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const colours = ["free", "cached", "shared"].map((name) => style.getPropertyValue(`--${name}`));
  cells.forEach((cell, i) => {
    context.fillStyle = cell < OWNED ? colours[cell] : hue(state.running[cell - OWNED]);
    context.fillRect((i % columns) * side, Math.floor(i / columns) * side, side - 1, side - 1);
  });
}

function tellCell(event) {
  const text = byId("cell");
  text.textContent = "";
  if (!shown) return;
  const { cells, size } = shown.pages, { side, columns } = grid(cells, byId("map").clientWidth);
  const i = Math.floor(event.offsetY / side) * columns + Math.floor(event.offsetX / side);
  if (cells[i] === undefined) return;
  const last = Math.min(shown.num_pages, (i + 1) * size) - 1;
  const pages = size > 1 ? `pages ${i * size} to ${last}` : `page ${i}`;
  const names = ["free", "in the prefix cache", "held by several sequences"];
  const what = names[cells[i]] ?? `held by request ${shown.running[cells[i] - OWNED].id}`;
  text.textContent = `${pages}: ${size > 1 ? "mostly " : ""}${what}`;
}

// Sequences

function cellOf(content) {
  const cell = make("td");
  cell.append(content);
  return cell;
}

function bar(done, of) {
  const box = make("span"), progress = make("progress");
  progress.max = Math.max(1, of);
  progress.value = done;
  box.append(progress, `${number(done)} of ${number(of)}`);
  return box;
}

function named(seq) {
  const box = make("span", seq.id);
  if (seq.priority) box.append(make("small", ` priority ${seq.priority}`));
  return box;
}

function runningRow(seq) {
  const row = make("tr"), swatch = make("td", undefined, "swatch"), colour = make("i");
  colour.style.background = hue(seq);
  swatch.append(colour);
  const whole = seq.computed >= seq.prompt_tokens;
  const prompt = whole ? make("span", number(seq.prompt_tokens)) : bar(seq.computed, seq.prompt_tokens);
  if (seq.cached) prompt.append(make("small", ` ${number(seq.cached)} cached`));
  const output = seq.max_tokens ? bar(seq.output_tokens, seq.max_tokens) : number(seq.output_tokens);
  const pages = make("span", number(seq.pages));
  if (seq.forgotten) pages.append(make("small", ` ${number(seq.forgotten)} forgotten`));
  row.append(swatch, cellOf(named(seq)), cellOf(prompt), cellOf(output));
  row.append(cellOf(pages), cellOf(seconds(seq.age)));
  return row;
}

function waitingRow(seq) {
  const row = make("tr");
  const values = [number(seq.prompt_tokens), number(seq.output_tokens), seq.preemptions, seconds(seq.age)];
  row.append(cellOf(named(seq)), ...values.map((value) => cellOf(String(value))));
  return row;
}

function fill(id, sequences, toRow, total) {
  const body = byId(id).tBodies[0];
  body.replaceChildren(...sequences.map(toRow));
  if (total > sequences.length) {
    const rest = make("td", `and ${number(total - sequences.length)} more`);
    rest.colSpan = 6;
    const row = make("tr");
    row.append(rest);
    body.append(row);
  }
}

// The prefix tree; what was opened stays open while the state comes anew.

const opened = new Set();

function branch(node, depth) {
  const item = make("li"), root = depth === 0;
  const about = [
    root ? `${number(node.hits)} began` : `${number(node.hits)} hits`,
    node.running ? `${number(node.running)} running` : "",
    node.host ? `${number(node.host)} of ${number(node.nodes)} pages on the host` : "",
  ].filter(Boolean);
  const line = [root ? "start" : `${number(node.tokens)} tokens`, make("small", ` ${about.join(", ")}`)];
  if (!node.children.length && !node.more) {
    const leaf = make("p");
    leaf.append(...line);
    item.append(leaf);
    return item;
  }
  const details = make("details"), summary = make("summary"), list = make("ul");
  summary.append(...line);
  details.append(summary, list);
  const key = root ? `!${node.key}` : node.key; // a root is open until it is closed
  details.open = opened.has(key) !== root;
  const grow = () => {
    list.replaceChildren(...node.children.map((child) => branch(child, depth + 1)));
    if (node.more) list.append(make("li", `and ${number(node.more)} more`, "quiet"));
  };
  if (details.open) grow();
  summary.addEventListener("click", () => {
    if (!opened.delete(key)) opened.add(key);
    if (!list.children.length) grow();
  });
  item.append(details);
  return item;
}

// The whole page

// Of several engines one is shown.

function drawEngines(state) {
  const select = byId("engine");
  if (select.options.length === state.engines) return;
  select.hidden = state.engines < 2;
  const options = Array.from({ length: state.engines }, (_, i) => new Option(`engine ${i}`, i));
  select.replaceChildren(...options);
  select.value = state.engine;
}

function showOther() {
  shown = null;
  for (const chart of CHARTS) chart.points = [];
}

function aboutPages(state) {
  const layers = state.groups > 1 ? ` of one of ${number(state.groups)} groups of layers` : "";
  const cells = state.pages.size > 1 ? `; a cell is ${number(state.pages.size)} pages` : "";
  return `${number(state.num_pages)} pages, each of ${state.block_size} tokens${layers}${cells}`;
}

function draw(state) {
  const { stats } = state, before = shown ?? state;
  drawEngines(state);
  shown = state;
  byId("model").textContent = state.model;
  byId("pages-used").textContent = number(stats.pages_used);
  byId("pages-cached").textContent = number(stats.pages_cached);
  byId("pages-free").textContent = number(stats.pages_free);
  byId("pages-host").textContent = `${number(stats.host_pages_used)} of ${number(stats.host_pages)}`;
  byId("pages-host").parentElement.hidden = !stats.host_pages;
  byId("pages-about").textContent = aboutPages(state);
  byId("num-running").textContent = number(stats.num_running);
  byId("num-waiting").textContent = number(stats.num_waiting);
  byId("hit-rate").textContent = stats.prefix_queries
    ? `${percent(stats.prefix_hits / stats.prefix_queries)} of ${number(stats.prefix_queries)} tokens were there`
    : "";
  drawCharts(state, before);
  drawMap(state);
  fill("running", state.running, runningRow, stats.num_running);
  fill("waiting", state.waiting, waitingRow, stats.num_waiting);
  byId("tree").replaceChildren(...state.tree.map((node) => branch(node, 0)));
}

function tell(text, bad) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", Boolean(bad));
}

function show(id) {
  for (const name of ["login", "board"]) byId(name).hidden = name !== id;
}

async function poll() {
  const key = sessionStorage.getItem("llmjax-key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const asked = byId("engine").value || 0;
  const response = await fetch(`/dashboard/state?engine=${asked}`, { headers, cache: "no-store" });
  if (response.status === 401) {
    sessionStorage.removeItem("llmjax-key");
    byId("refused").hidden = !key;
    tell("locked");
    show("login");
    byId("key").focus();
    return false;
  }
  const state = await response.json();
  if (!response.ok) {
    tell(state.error.message, true);
    return true;
  }
  show("board");
  if (String(state.engine) !== String(byId("engine").value || 0)) return true; // another is asked for by now
  draw(state);
  tell(state.draining ? "shutting down" : `live, ${number(state.steps)} steps`);
  return true;
}

async function run() {
  let again = true;
  while (again) {
    if (!document.hidden) {
      try {
        again = await poll();
      } catch (error) {
        tell(`no answer: ${error.message}`, true);
      }
    }
    if (again) await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
}

makeCharts();
byId("engine").addEventListener("change", showOther);
byId("map").addEventListener("pointermove", tellCell);
byId("map").addEventListener("pointerleave", () => (byId("cell").textContent = ""));
window.addEventListener("resize", () => shown && drawMap(shown));
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("llmjax-key", byId("key").value);
  byId("key").value = "";
  run();
});
run();
