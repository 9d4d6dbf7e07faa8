"use strict";
// The report. Text from a model is inserted by textContent, never as markup.

const top_drawing = JSON.parse(document.getElementById("content").textContent);
const by_id = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const MANY = 60; // a module with more parts shows them in groups

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    key.startsWith("on") ? made.addEventListener(key.slice(2), value) : made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const milliseconds = (seconds) => `${(seconds * 1e3).toFixed(seconds < 0.01 ? 3 : 1)} ms`;
const percent = (share) => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024 || unit === "GiB") return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
}
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
function table(heads, rows) {
  const cell = (kind) => (value, column) =>
    element(kind, heads[column].startsWith("#") ? { class: "number" } : {}, value instanceof Node ? value : String(value));
  return element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head, column) => cell("th")(head.replace("#", ""), column)))),
    element("tbody", {}, ...rows.map(({ cells, ...attributes }) => element("tr", attributes, ...cells.map(cell("td"))))));
}

// The tree of modules: a group has children, which are groups or nodes; a leaf has the number of its node.

function tree_of(nodes) {
  const root = { id: "", label: "model", path: "", children: [], parent: null };
  const groups = new Map([["", root]]);
  const group_at = (path) => {
    if (!groups.has(path)) {
      const cut = path.lastIndexOf(".");
      const parent = group_at(cut < 0 ? "" : path.slice(0, cut));
      const made = { id: `m:${path}`, label: path.slice(cut + 1), path, children: [], parent };
      groups.set(path, made);
      parent.children.push(made);
    }
    return groups.get(path);
  };
  const leaves = nodes.map((node, number) => {
    const parent = group_at(node.module);
    const leaf = { id: `n:${number}`, label: node.name, node: number, parent };
    parent.children.push(leaf);
    return leaf;
  });
  divide(root);
  return { root, leaves };
}

function divide(group) {
  while (group.children.length > MANY) {
    const parts = [];
    for (let first = 0; first < group.children.length; first += MANY) {
      const children = group.children.slice(first, first + MANY);
      const label = `${children[0].label} … ${children[children.length - 1].label}`;
      const part = { id: `${group.id}/${first}+${group.children.length}`, label, path: group.path, children, parent: group };
      for (const child of children) child.parent = part;
      parts.push(part);
    }
    group.children = parts;
  }
  for (const child of group.children) if (child.children) divide(child);
}

function leaves_of(item) {
  return item.children ? item.children.flatMap(leaves_of) : [item.node];
}

// One graph: its tree, its open modules, and their layout. Each open module is laid out by itself, with its parts as
// boxes, so that the layout takes time only for visible parts.

class Graph {
  constructor(drawing) {
    this.drawing = drawing;
    Object.assign(this, tree_of(drawing.nodes));
    this.open = new Set([""]);
    this.layouts = new Map();
    this.edges = this.edges_by_group();
    this.shares = new Map();
    this.open_first();
  }

  open_first() { // open modules at the start, the outermost first, until enough parts are visible
    let seen = this.root.children.length;
    for (const queue = [...this.root.children]; queue.length; ) {
      const item = queue.shift();
      if (!item.children || seen + item.children.length > 24) continue;
      this.open.add(item.id);
      seen += item.children.length - 1;
      queue.push(...item.children);
    }
  }

  edges_by_group() {
    const edges = new Map();
    const above = (item) => {
      const way = [];
      for (let at = item; at; at = at.parent) way.unshift(at);
      return way;
    };
    this.drawing.nodes.forEach((node, reader) => {
      const way = above(this.leaves[reader]);
      for (const read of node.inputs) {
        const other = above(this.leaves[read]);
        let depth = 0;
        while (way[depth + 1] && way[depth + 1] === other[depth + 1]) depth += 1;
        const [from, to] = [other[depth + 1], way[depth + 1]];
        if (!from || !to) continue;
        const group = way[depth];
        if (!edges.has(group.id)) edges.set(group.id, new Map());
        edges.get(group.id).set(`${from.id}\n${to.id}`, [from.id, to.id]);
      }
    });
    return edges;
  }

  engine_shares(item) { // the share of an item's nodes on each engine
    if (!this.shares.has(item.id)) {
      const counts = new Map();
      for (const number of leaves_of(item)) {
        const engine = this.drawing.nodes[number].engine;
        if (engine) counts.set(engine, (counts.get(engine) || 0) + 1);
      }
      const total = sum([...counts.values()]) || 1;
      this.shares.set(item.id, [...counts].map(([engine, count]) => [engine, count / total]));
    }
    return this.shares.get(item.id);
  }

  layout(group) {
    if (this.layouts.has(group.id)) return this.layouts.get(group.id);
    const inner = new dagre.graphlib.Graph();
    inner.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 30, marginx: 14, marginy: 12 });
    inner.setDefaultEdgeLabel(() => ({}));
    for (const item of group.children) {
      const size = item.children && this.open.has(item.id) ? this.layout(item) : this.size(item);
      inner.setNode(item.id, { width: size.width, height: size.height + (size.items ? 24 : 0) });
    }
    for (const [from, to] of (this.edges.get(group.id) || new Map()).values()) inner.setEdge(from, to);
    dagre.layout(inner);
    const { width, height } = inner.graph();
    const items = group.children.map((item) => ({ item, ...inner.node(item.id) }));
    const lines = inner.edges().map((edge) => inner.edge(edge).points);
    const laid = { width: Math.max(width, 90), height: Math.max(height, 40), items, lines };
    this.layouts.set(group.id, laid);
    return laid;
  }

  size(item) {
    const operator = item.children ? "" : this.drawing.nodes[item.node].op;
    const text = Math.max(7.2 * Math.min(item.label.length, 34) + (item.children ? 40 : 16), 5.6 * operator.length + 16);
    return { width: Math.max(84, text), height: item.children ? 44 : 38 };
  }

  changed(item) {
    for (let at = item; at; at = at.parent) this.layouts.delete(at.id);
  }

  toggle(item) {
    this.open.has(item.id) ? this.open.delete(item.id) : this.open.add(item.id);
    this.changed(item);
  }

  reveal(item) {
    for (let at = item.parent; at; at = at.parent) {
      this.open.add(at.id);
      this.layouts.delete(at.id);
    }
  }

  open_level() {
    const level = [];
    const visit = (group) => {
      for (const item of group.children) {
        if (!item.children) continue;
        this.open.has(item.id) ? visit(item) : level.push(item);
      }
    };
    visit(this.root);
    for (const item of level) {
      this.open.add(item.id);
      this.changed(item);
    }
  }

  close_all() {
    this.open = new Set([""]);
    this.layouts.clear();
  }
}

// The visible part of the graph.

const view = { x: 0, y: 0, scale: 1 };
const canvas = by_id("graph");
const scene = canvas.appendChild(shape("g", {}));
let graph, selected = null, places = new Map();

function draw() {
  places = new Map();
  scene.replaceChildren();
  draw_group(graph.root, scene, 0, 0);
  move();
}

function draw_group(group, parent, x, y) {
  const laid = graph.layout(group);
  for (const line of laid.lines) {
    const [first, ...rest] = line;
    const path = `M${first.x + x},${first.y + y}` + rest.map((point) => `L${point.x + x},${point.y + y}`).join("");
    parent.appendChild(shape("path", { class: "edge", d: path, "marker-end": "url(#arrow)" }));
  }
  for (const { item, x: middle_x, y: middle_y, width, height } of laid.items)
    draw_item(item, parent, x + middle_x - width / 2, y + middle_y - height / 2, width, height);
}

function draw_item(item, parent, x, y, width, height) {
  const is_open = item.children && graph.open.has(item.id);
  const kind = `item ${item.children ? "module" : "leaf"}${selected === item ? " selected" : ""}`;
  const box = parent.appendChild(shape("g", { class: kind, "data-id": item.id }));
  places.set(item.id, { x: x + width / 2, y: y + height / 2, width, height });
  box.appendChild(shape("rect", { class: "box", x, y, width, height, rx: 6 }));
  let left = x;
  for (const [engine, share] of graph.engine_shares(item)) {
    const fill = graph.drawing.colours[engine];
    box.appendChild(shape("rect", { x: left, y, width: width * share, height: 5, fill }));
    left += width * share;
  }
  const label = item.label.length > 34 ? `${item.label.slice(0, 33)}…` : item.label;
  box.appendChild(shape("text", { x: x + 8, y: y + 19 }, label));
  if (item.children) {
    if (!is_open) box.appendChild(shape("text", { class: "small", x: x + 8, y: y + 35 }, plural(leaves_of(item).length, "node")));
    const sign = box.appendChild(shape("g", { class: "sign-box", "data-toggle": item.id }));
    sign.appendChild(shape("rect", { class: "toggle", x: x + width - 22, y: y + 8, width: 16, height: 16, rx: 3 }));
    sign.appendChild(shape("text", { class: "sign", x: x + width - 14, y: y + 20 }, is_open ? "−" : "+"));
    sign.addEventListener("click", (event) => {
      event.stopPropagation();
      toggle(item);
    });
  } else {
    box.appendChild(shape("text", { class: "small", x: x + 8, y: y + 32 }, graph.drawing.nodes[item.node].op));
  }
  box.addEventListener("click", (event) => {
    event.stopPropagation();
    if (!dragged) select(item);
  });
  if (is_open) draw_group(item, box, x, y + 24);
}

function toggle(item) { // the clicked item stays under the pointer
  const before = places.get(item.id);
  graph.toggle(item);
  draw();
  const after = places.get(item.id);
  if (before && after) {
    view.x += (before.x + before.width / 2 - after.x - after.width / 2) * view.scale;
    view.y += (before.y - before.height / 2 - (after.y - after.height / 2)) * view.scale;
    move();
  }
}

const move = () => scene.setAttribute("transform", `translate(${view.x},${view.y}) scale(${view.scale})`);

function fit() {
  const { width, height } = graph.layout(graph.root);
  const room = canvas.getBoundingClientRect();
  view.scale = Math.max(0.05, Math.min(1.2, room.width / width, room.height / height));
  if (view.scale < 0.45) view.scale = Math.min(1, Math.max(0.45, room.width / width)); // readable; the rest by panning
  view.x = Math.max(0, (room.width - width * view.scale) / 2);
  view.y = 4;
  move();
}

function zoom(factor, x, y) {
  const room = canvas.getBoundingClientRect();
  const [at_x, at_y] = [x ?? room.width / 2, y ?? room.height / 2];
  const scale = Math.max(0.03, Math.min(4, view.scale * factor));
  view.x = at_x - ((at_x - view.x) * scale) / view.scale;
  view.y = at_y - ((at_y - view.y) * scale) / view.scale;
  view.scale = scale;
  move();
}

function center(item) {
  const place = places.get(item.id);
  const room = canvas.getBoundingClientRect();
  view.scale = Math.max(view.scale, 0.7);
  view.x = room.width / 2 - place.x * view.scale;
  view.y = room.height / 2 - Math.min(place.y, place.y - place.height / 2 + room.height / 3) * view.scale;
  move();
}

function go_to(item) {
  graph.reveal(item);
  selected = item;
  draw();
  center(item);
  show_details(item);
}

function select(item) {
  selected = item;
  for (const box of scene.querySelectorAll(".selected")) box.classList.remove("selected");
  for (const box of scene.querySelectorAll("g.item")) if (box.dataset.id === item.id) box.classList.add("selected");
  show_details(item);
}

let dragged = false, grip = null;
canvas.addEventListener("pointerdown", (event) => {
  grip = { x: event.clientX - view.x, y: event.clientY - view.y, from: [event.clientX, event.clientY] };
  dragged = false;
});
window.addEventListener("pointermove", (event) => {
  if (!grip) return;
  dragged ||= Math.abs(event.clientX - grip.from[0]) + Math.abs(event.clientY - grip.from[1]) > 4;
  if (!dragged) return;
  [view.x, view.y] = [event.clientX - grip.x, event.clientY - grip.y];
  move();
});
window.addEventListener("pointerup", () => { grip = null; });
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const room = canvas.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY / 400), event.clientX - room.left, event.clientY - room.top);
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
  if (event.key === "+") zoom(1.25);
  else if (event.key === "-") zoom(0.8);
  else if (event.key === "0") fit();
  else if (steps[event.key]) {
    view.x += steps[event.key][0];
    view.y += steps[event.key][1];
    move();
  } else return;
  event.preventDefault();
});
by_id("zoom-in").addEventListener("click", () => zoom(1.25));
by_id("zoom-out").addEventListener("click", () => zoom(0.8));
by_id("fit").addEventListener("click", fit);
by_id("expand").addEventListener("click", () => { graph.open_level(); draw(); });
by_id("collapse").addEventListener("click", () => { graph.close_all(); draw(); fit(); });

// The details of the clicked item, beside the graph.

function link(text, action) {
  return element("a", { class: "link", role: "button", tabindex: "0", onclick: action,
    onkeydown: (event) => { if (event.key === "Enter") action(); } }, text);
}

function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== "" && value !== null);
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function node_link(number) {
  return link(graph.drawing.nodes[number].name, () => go_to(graph.leaves[number]));
}

function listed(parts) {
  return element("span", {}, ...parts.flatMap((part, number) => (number ? [", ", part] : [part])));
}

function show_details(item) {
  const panel = by_id("details");
  if (item.children) {
    const numbers = leaves_of(item);
    const counts = new Map();
    for (const number of numbers) {
      const { op } = graph.drawing.nodes[number];
      counts.set(op, (counts.get(op) || 0) + 1);
    }
    const ops = [...counts].sort((one, other) => other[1] - one[1]);
    panel.replaceChildren(
      element("h2", {}, item.path || "the model"),
      element("button", { type: "button", onclick: () => toggle(item) }, graph.open.has(item.id) ? "Close" : "Open"),
      facts([["nodes", String(numbers.length)],
        ["engines", graph.engine_shares(item).map(([engine, share]) => `${engine} ${percent(share)}`).join(", ")]]),
      table(["operator", "#nodes"], ops.map(([op, count]) => ({ cells: [op, count] }))));
    return;
  }
  const node = graph.drawing.nodes[item.node];
  const readers = graph.drawing.nodes.flatMap((other, number) => (other.inputs.includes(item.node) ? [number] : []));
  const reasons = Object.entries(node.reasons);
  panel.replaceChildren(
    element("h2", {}, node.name),
    facts([["operator", element("code", {}, node.op)], ["result", node.shape], ["module", node.module],
      ["source", node.source ? element("code", {}, node.source) : ""], ["engine", node.engine],
      ["segment", node.segment < 0 ? "" : link(String(node.segment), () => show_segment(node.segment))],
      ["reads", node.inputs.length ? listed(node.inputs.map(node_link)) : ""],
      ["read by", readers.length ? listed(readers.map(node_link)) : ""]]),
    reasons.length ? table(["not on", "because"], reasons.map((cells) => ({ cells }))) : "");
}

function show_segment(number) {
  const segment = graph.drawing.segments[number];
  const first = graph.drawing.nodes.findIndex((node) => node.segment === number);
  by_id("details").replaceChildren(
    element("h2", {}, `Segment ${number} on ${segment.engine}`),
    first < 0 ? "" : link("show in the graph", () => { go_to(graph.leaves[first]); show_segment(number); }),
    facts([["nodes", String(segment.nodes)], ["time", segment.seconds === null ? "" : milliseconds(segment.seconds)],
      ["inputs", segment.inputs.join(", ")], ["outputs", segment.outputs.join(", ")],
      ["bytes in", bytes(segment.bytes_in)], ["bytes out", bytes(segment.bytes_out)],
      ["never merged", segment.alone ? "yes" : ""]]),
    ...(segment.layers
      ? [element("h2", {}, "Layers before rewriting"), element("pre", { class: "before" }, segment.layers.converted),
         element("h2", {}, "Layers after rewriting"), element("pre", { class: "after" }, segment.layers.rewritten),
         ...(segment.layers.rewrites.length ? [element("h2", {}, "Rewrites"), element("pre", {}, segment.layers.rewrites.join("\n"))] : [])]
      : []));
}

// The parts of the page above and below the graph.

function swatch(engine) {
  return element("span", { class: "swatch", style: `background:${graph.drawing.colours[engine]}` });
}

function show_time() {
  const { drawing } = graph;
  let by_engine = Object.entries(drawing.engine_seconds);
  const is_timed = by_engine.length > 0;
  if (!is_timed) {
    const work = new Map();
    for (const node of drawing.nodes) if (node.engine) work.set(node.engine, (work.get(node.engine) || 0) + node.work);
    by_engine = [...work];
  }
  const total = sum(by_engine.map(([, part]) => part)) || 1;
  const stack = element("div", { class: "stack" }, ...by_engine.map(([engine, part]) =>
    element("div", { style: `width:${(100 * part) / total}%;background:${drawing.colours[engine]}`, title: engine })));
  const rows = by_engine.map(([engine, part]) => ({ cells: [element("span", {}, swatch(engine), engine),
    is_timed ? milliseconds(part) : "", percent(part / total)] }));
  const parts = drawing.segments.map((segment, number) => ({ number, segment })).filter(({ segment }) => segment.seconds !== null);
  parts.sort((one, other) => other.segment.seconds - one.segment.seconds);
  by_id("time").replaceChildren(
    element("p", { class: "faint" }, is_timed ? drawing.timed_how : "No time was measured: these are shares of the estimated work."),
    stack, table(["engine", "#time", "#share"], rows),
    ...(parts.length > 1 ? [element("h2", {}, "By segment"), table(["segment", "#time"], parts.slice(0, 12).map(({ number, segment }) =>
      ({ cells: [link(`${number}, ${segment.engine}`, () => show_segment(number)), milliseconds(segment.seconds)] })))] : []));
}

function show_trials() {
  const { trials, measured_how } = graph.drawing;
  const best = trials.find((trial) => trial.chosen);
  const compared = (trial) => // only plans in the same race were timed under the same conditions
    trial.chosen ? "chosen" : trial.last_race ? `${(trial.seconds / best.seconds).toFixed(2)}x` : "left the race";
  const rows = trials.map((trial) => ({ class: trial.chosen ? "chosen" : "", cells: [trial.name, milliseconds(trial.seconds),
    milliseconds(trial.spread), compared(trial), trial.segments] }));
  by_id("trials").replaceChildren(element("p", { class: "faint" }, measured_how || "No plans were measured: the engines are used in their order."),
    trials.length ? table(["plan", "#a call", "#±", "#", "#segments"], rows) : "");
}

function show_advice() {
  const { advice } = graph.drawing;
  by_id("advice").replaceChildren(advice.length
    ? element("ol", {}, ...advice.map((line) => element("li", {}, line)))
    : element("p", { class: "faint" }, "No single converter would merge segments."));
}

function show_segments() {
  const rows = graph.drawing.segments.map((segment, number) => ({ "data-segment": number, cells: [number,
    element("span", {}, swatch(segment.engine), segment.engine), segment.nodes,
    segment.seconds === null ? "" : milliseconds(segment.seconds), bytes(segment.bytes_in), bytes(segment.bytes_out),
    segment.operators] }));
  by_id("segments").replaceChildren(table(["#", "engine", "#nodes", "#time", "#in", "#out", "operators"], rows));
  for (const row of by_id("segments").querySelectorAll("tr[data-segment]"))
    row.addEventListener("click", () => show_segment(Number(row.dataset.segment)));
}

function show_fallbacks() {
  const { nodes } = graph.drawing;
  const total = sum(nodes.map((node) => (node.engine ? node.work : 0))) || 1;
  const groups = new Map();
  nodes.forEach((node, number) => {
    for (const [engine, reason] of Object.entries(node.reasons)) {
      const key = JSON.stringify([engine, node.op, reason]);
      const group = groups.get(key) || { engine, op: node.op, reason, numbers: [], work: 0 };
      group.numbers.push(number);
      group.work += node.work;
      groups.set(key, group);
    }
  });
  const ranked = [...groups.values()].sort((one, other) => other.work - one.work || other.numbers.length - one.numbers.length);
  by_id("fallbacks").replaceChildren(ranked.length
    ? table(["operator", "not on", "because", "#nodes", "#share of the work", "first at"], ranked.map(({ engine, op, reason, numbers, work }) =>
        ({ cells: [op, engine, reason, numbers.length, percent(work / total),
          element("span", {}, node_link(numbers[0]), " ", element("code", {}, nodes[numbers[0]].source))] })))
    : element("p", { class: "faint" }, "Every node runs on its first engine."));
}

function search() {
  const words = by_id("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = by_id("hits");
  hits.hidden = words.length === 0;
  if (hits.hidden) return;
  const found = [];
  graph.drawing.nodes.forEach((node, number) => {
    const text = `${node.name} ${node.op} ${node.module} ${node.source} ${node.engine}`.toLowerCase();
    if (words.every((word) => text.includes(word))) found.push(number);
  });
  hits.replaceChildren(...found.slice(0, 50).map((number) => {
    const node = graph.drawing.nodes[number];
    const text = [node.name, node.op, node.module, node.engine].filter(Boolean).join("  ·  ");
    return element("li", {}, element("button", { type: "button", onclick: () => go_to(graph.leaves[number]) }, text));
  }), element("li", { class: "faint" }, found.length > 50 ? `and ${found.length - 50} more` : plural(found.length, "hit")));
}
by_id("search").addEventListener("input", search);
by_id("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") by_id("hits").querySelector("button")?.click();
});

function show(drawing) {
  graph = new Graph(drawing);
  selected = null;
  by_id("heading").textContent = drawing.heading;
  by_id("legend").replaceChildren(...Object.keys(drawing.colours).map((engine) => element("span", {}, swatch(engine), engine)));
  by_id("notes-section").hidden = drawing.notes.length === 0;
  by_id("notes").replaceChildren(...drawing.notes.map((note) => element("li", {}, note)));
  for (const part of [show_time, show_trials, show_advice, show_segments, show_fallbacks, draw, fit]) part();
}

const arrow = canvas.insertBefore(shape("defs", {}), scene);
arrow.appendChild(shape("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }))
  .appendChild(shape("path", { d: "M0,0L8,4L0,8z", fill: "#8a8f98" }));
by_id("theme").addEventListener("click", () => {
  const is_dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = is_dark ? "light" : "dark";
});
const bodies = Object.entries(top_drawing.bodies);
if (bodies.length) {
  by_id("body-choice").hidden = false;
  const choices = [["the model", top_drawing], ...bodies];
  by_id("bodies").append(...choices.map(([name], number) => element("option", { value: number }, name)));
  by_id("bodies").addEventListener("change", (event) => show(choices[Number(event.target.value)][1]));
}
show(top_drawing);
