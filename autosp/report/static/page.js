"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (parent, tag, attributes = {}, text = "") => {
  const svg = ["g", "rect", "text", "path", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  parent.appendChild(element);
  return element;
};
const bytes = (n) => {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return (n / size).toPrecision(3) + " " + unit;
  return n + " B";
};
const short = (operator) => operator.replace(/^(aten|autosp)\./, "").replace(/\.default$/, "");
let graph, view, picked;

// tabs
const names = { picture: "picture", operators: "operators", communication: "communication", masks: "masks and refusals", passes: "passes" };
function show(tab) {
  for (const id in names) {
    $(id).classList.toggle("on", id === tab);
    $("tab-" + id).classList.toggle("on", id === tab);
  }
  if (tab === "picture") fit();
}
for (const id in names) make($("tabs"), "button", { id: "tab-" + id }, names[id]).onclick = () => show(id);

// picture
const W = 170, H = 36;
function drawPicture() {
  const scene = $("scene");
  scene.replaceChildren();
  const at = Object.fromEntries(graph.drawing.boxes.map((box) => [box.name, box]));
  for (const edge of graph.drawing.edges) {
    const a = at[edge.from], b = at[edge.to];
    const x1 = a.x + W / 2, y1 = a.y + H, x2 = b.x + W / 2, y2 = b.y;
    const bend = Math.min(40, Math.max(14, (y2 - y1) / 2));
    const moved = edge.collectives.length > 0;
    make(scene, "path", { class: "line" + (moved ? " moved" : ""), d: `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}` });
    if (!moved) continue;
    const label = edge.collectives.map((name) => short(graph.byCollective[name].operator)).join(", ");
    const mark = make(scene, "circle", { class: "mark", cx: (x1 + x2) / 2, cy: (y1 + y2) / 2, r: 5, "data-edge": `${edge.from}>${edge.to}` });
    make(mark, "title", {}, label);
    make(scene, "text", { class: "marktext", x: (x1 + x2) / 2 + 8, y: (y1 + y2) / 2 + 3 }, label);
    mark.onclick = () => tell(edge.collectives.map((name) => collectiveText(graph.byCollective[name])).join("\n\n"));
  }
  for (const box of graph.drawing.boxes) {
    const node = graph.byName[box.name];
    const group = make(scene, "g", { class: `box ${box.kind}`, transform: `translate(${box.x},${box.y})`, "data-name": box.name });
    make(group, "rect", { width: W, height: H });
    make(group, "text", { x: 6, y: 15 }, short(node.operator) + (["input", "parameter", "constant"].includes(node.operator) ? " " + node.label.slice(-22) : ""));
    make(group, "text", { x: 6, y: 29 }, "[" + node.shape.join(", ") + "]");
    group.onclick = () => pick(box.name);
  }
}
function collectiveText(item) {
  return `${item.operator}\n${item.reason}\nforward ${bytes(item.forward_bytes)}, backward ${bytes(item.backward_bytes)} a step and rank\n[${item.shape.join(", ")}] ${item.dtype}\n${item.location}`;
}
function tell(text) { $("detail").textContent = text; }
function pick(name) {
  const node = graph.byName[name];
  for (const element of document.querySelectorAll(".box.picked")) element.classList.remove("picked");
  const element = document.querySelector(`.box[data-name="${CSS.escape(name)}"]`);
  if (element) element.classList.add("picked");
  picked = name;
  const moves = graph.collectives.filter((item) => item.origin === name).map(collectiveText);
  tell([`${node.name} = ${node.operator}${node.label !== node.name ? " " + node.label : ""}`, `[${node.shape.join(", ")}] ${node.dtype}, ${bytes(node.bytes)} whole`, `layout: ${node.layout}`, node.note, `layer: ${node.layer}`, node.location, ...moves].filter(Boolean).join("\n"));
}
function apply() { $("svg").setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`); }
function fit() {
  const box = $("svg").getBoundingClientRect();
  if (!box.width) return;
  const scale = Math.max(graph.drawing.width / box.width, Math.min(graph.drawing.height / box.height, 1.2));
  view = { x: graph.drawing.left - 20, y: -20, w: box.width * scale, h: box.height * scale };
  apply();
}
function whole() {
  const box = $("svg").getBoundingClientRect();
  const scale = 1.05 * Math.max(graph.drawing.width / box.width, graph.drawing.height / box.height);
  view = { x: graph.drawing.left - 20, y: -20, w: box.width * scale, h: box.height * scale };
  apply();
}
$("svg").addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = $("svg").getBoundingClientRect(), factor = event.deltaY > 0 ? 1.2 : 1 / 1.2;
  const px = (event.clientX - box.left) / box.width, py = (event.clientY - box.top) / box.height;
  view = { x: view.x + px * view.w * (1 - factor), y: view.y + py * view.h * (1 - factor), w: view.w * factor, h: view.h * factor };
  apply();
}, { passive: false });
let drag = null;
$("svg").addEventListener("pointerdown", (event) => { drag = { x: event.clientX, y: event.clientY, view: { ...view } }; });
window.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const box = $("svg").getBoundingClientRect();
  view.x = drag.view.x - (event.clientX - drag.x) * drag.view.w / box.width;
  view.y = drag.view.y - (event.clientY - drag.y) * drag.view.h / box.height;
  apply();
});
window.addEventListener("pointerup", () => { drag = null; });
window.addEventListener("keydown", (event) => { if (event.key === "f" && event.target.tagName !== "INPUT") whole(); });

// tables
function table(section, heads, rows) {
  const target = $(section).querySelector("table");
  target.tHead.replaceChildren(); target.tBodies[0].replaceChildren();
  const head = make(target.tHead, "tr");
  for (const name of heads) make(head, "th", {}, name);
  for (const row of rows) {
    const line = make(target.tBodies[0], "tr", { "data-name": row.name });
    row.cells.forEach((cell, index) => make(line, "td", index === row.coloured ? { class: row.kind } : {}, cell));
    line.onclick = () => { show("picture"); pick(row.name); centre(row.name); };
  }
}
function centre(name) {
  const box = graph.drawing.boxes.find((one) => one.name === name);
  if (!box) return;
  view.x = box.x + W / 2 - view.w / 2; view.y = box.y - view.h / 2;
  apply();
}
function drawTables() {
  table("operators", ["value", "operator", "sizes", "layout", "how", "layer", "line of the model"], graph.nodes.map((n) => ({ name: n.name, kind: n.kind, coloured: 3, cells: [n.label, n.operator, `[${n.shape.join(", ")}] ${n.dtype}`, n.layout, n.note, n.layer, n.location] })));
  $("communication").querySelector("p").textContent = `One rank of ${graph.ranks} sends ${bytes(graph.collectives.reduce((s, c) => s + c.forward_bytes, 0))} in the forward and ${bytes(graph.collectives.reduce((s, c) => s + c.backward_bytes, 0))} in the backward of a step.`;
  table("communication", ["operator", "forward", "backward", "why", "layer"], graph.collectives.map((c) => ({ name: c.origin, cells: [c.operator, bytes(c.forward_bytes), bytes(c.backward_bytes), c.reason, c.layer] })));
  const masks = $("masks");
  masks.replaceChildren();
  const list = (title, items) => {
    if (!items.length) return;
    make(masks, "h2", {}, title);
    const ul = make(masks, "ul");
    for (const item of items) make(ul, "li", {}, item);
  };
  if (graph.refused.operator) list("refused", [`${graph.refused.operator}: ${graph.refused.reason}`, graph.refused.location, graph.refused.remedy].filter(Boolean));
  list("masks", graph.masks.map((m) => `${m.layer || m.attention}: ${m.became}${m.bytes ? ", " + bytes(m.bytes) : ""}`));
  list("rewritten by passes", graph.fused);
  list("gathered", graph.gathered.map((g) => `${g.operator}, ${bytes(g.bytes)}: ${g.reason} (${g.location})`));
}

// passes
function drawPasses() {
  $("passlist").replaceChildren();
  graph.passes.slice(1).forEach((entry, index) => {
    make($("passlist"), "button", { id: "pass-" + entry.name }, `${entry.name} (${Math.round(entry.seconds * 1000)} ms)`).onclick = () => showPass(index + 1);
  });
  if (graph.passes.length > 1) showPass(1);
}
function showPass(index) {
  const before = graph.passes[index - 1], after = graph.passes[index];
  for (const button of $("passlist").children) button.classList.toggle("on", button.id === "pass-" + after.name);
  $("beforename").textContent = "before " + after.name;
  $("aftername").textContent = "after " + after.name;
  const lines = (text) => text.split("\n");
  const fill = (target, mine, others, mark) => {
    target.replaceChildren();
    const known = new Set(others);
    for (const line of mine) make(target, "span", known.has(line) ? {} : { class: mark }, line + "\n");
  };
  fill($("before"), lines(before.text), lines(after.text), "gone");
  fill($("after"), lines(after.text), lines(before.text), "new");
}

// search
$("search").oninput = () => {
  const wanted = $("search").value.trim().toLowerCase();
  const hits = !wanted ? [] : graph.nodes.filter((n) => [n.name, n.label, n.operator, n.layer, n.location, n.layout, n.note].join(" ").toLowerCase().includes(wanted)).map((n) => n.name);
  const set = new Set(hits);
  for (const element of document.querySelectorAll(".box, #operators tbody tr")) element.classList.toggle("hit", set.has(element.dataset.name));
  $("hits").textContent = wanted ? `${hits.length} found` : "";
  if (hits.length) centre(hits[0]);
};

function select(index) {
  graph = data.graphs[index];
  graph.byName = Object.fromEntries(graph.nodes.map((n) => [n.name, n]));
  graph.byCollective = Object.fromEntries(graph.collectives.map((c) => [c.name, c]));
  drawPicture(); drawTables(); drawPasses(); fit();
}
data.graphs.forEach((_, index) => make($("graph"), "option", { value: index }, `${index + 1} of ${data.graphs.length}`));
$("graph").onchange = () => select(Number($("graph").value));
select(data.graphs.length - 1);
$("graph").value = data.graphs.length - 1;
show("picture");
