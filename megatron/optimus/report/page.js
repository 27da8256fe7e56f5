"use strict";
// Draws the page from the JSON in #data. All text goes through textContent: names in a run's files are never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs, root = document.getElementById("page"), tip = document.getElementById("tip");
const many = runs.length > 1;
const state = { x: "tokens", smooth: 0, log: false, zoom: null, hidden: new Set() };
const AXES = { tokens: "tokens", flops: "FLOPs", hours: "hours", step: "steps" };
const charts = [], redraws = [];

// ---- small helpers: elements, numbers
function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "style") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const color = index => `--c: var(--r${index % 8})`;
function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace(/\.?0+e/, "e");
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return `${trim(value / (suffix === "k" ? 1e3 : limit), digits)}${suffix}`;
  return trim(value, digits);
}
function trim(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes("e") ? String(Math.round(value)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${trim(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours < 1) return seconds < 600 ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s` : `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
const count = value => Number(value).toLocaleString("en-US");
const percent = share => share === null || share === undefined ? "–" : `${trim(100 * share, 3)} %`;
const bytes = count => { let unit = 0; while (count >= 1000 && unit < 5) { count /= 1000; unit++; } return `${trim(count, 3)} ${["B", "kB", "MB", "GB", "TB", "PB"][unit]}`; };
const date = seconds => seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "–";
function atAxis(value, name) { return name === "hours" ? duration(value * 3600) : name === "step" ? `step ${count(value)}` : `${number(value)} ${AXES[name]}`; }

// ---- line charts
function series(key, run) { return runs[run].curves.lines[key] || null; }
function xOf(run) { return runs[run].curves.axes[state.x] || runs[run].curves.axes.step || []; }

function smoothed(values) { // exponential moving average without the bias of its start
  if (!state.smooth) return values;
  let mean = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = state.smooth * mean + (1 - state.smooth) * value; weight = state.smooth * weight + 1 - state.smooth;
    return mean / weight;
  });
}
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw * 0.999) || raw, found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && found.length < 50; k++) found.push(k * step);
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const m of [1, 2, 5]) { const t = m * 10 ** power; if (t >= low * 0.999 && t <= high * 1.001) found.push(t); }
  return found.length > 1 ? found : ticks(low, high, 4);
}
// The range of the values in view. A few far outliers do not flatten the rest: they get a mark at the edge.
function range(values, keepsStart) {
  const sorted = Float64Array.from(values).sort(), n = sorted.length;
  if (!n) return [0, 1];
  let low = sorted[0], high = sorted[n - 1];
  if (n > 20) {
    const at = share => sorted[Math.min(n - 1, Math.floor(share * n))];
    const cap = at(0.98) + 2.5 * (at(0.98) - at(0.1)), floor = at(0.02) - 2.5 * (at(0.9) - at(0.02));
    if (cap > at(0.98) && high > cap) high = keepsStart ? Math.min(high, Math.max(cap, values[0])) : cap;
    if (floor < at(0.02) && low < floor) low = floor;
  }
  if (high - low <= 1e-9 * Math.abs(high)) { const pad = Math.abs(low) * 0.1 || 1; return [low - pad, high + pad]; }
  return [low, high];
}

function chart({ title, keys, points = [], unit = "", height = 210, big = false, format = number, logarithmic = false }) {
  const present = runs.map((_, run) => run).filter(run => keys.some(key => series(key, run)) || points.some(key => runs[run].curves.points[key]));
  if (!present.length) return null;
  const last = el("span"), plot = svg("svg", { class: "plot", role: "img", "aria-label": title });
  const card = el("div", { className: "card chart" }, el("div", { className: "head" }, el("h3", { text: title }), last), plot);
  const self = { card, plot, draw };
  charts.push(self);
  let scale = null;

  function visible() { return present.filter(run => !state.hidden.has(run)); }
  function collect() {
    const lines = [];
    for (const run of visible()) {
      keys.forEach((key, which) => { const line = series(key, run); if (line) lines.push({ run, which, x: xOf(run), y: smoothed(line.mean), raw: line.mean, low: line.low, high: line.high, key }); });
      points.forEach(key => { const one = runs[run].curves.points[key]; if (one) lines.push({ run, x: one[state.x] || one.step, y: one.value, raw: one.value, isPoints: true, key, dashed: keys.length > 0 }); });
    }
    return lines;
  }
  function draw() {
    const width = Math.max(200, plot.clientWidth || card.clientWidth - 32), lines = collect();
    const left = 50, right = 10, top = 8, bottom = 24, w = width - left - right, h = height - top - bottom;
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`); plot.setAttribute("height", height);
    plot.replaceChildren();
    const xs = lines.flatMap(line => line.x.length ? [line.x[0], line.x[line.x.length - 1]] : []);
    const start = Math.min(...xs), end = Math.max(...xs);
    let [x0, x1] = state.zoom || [start > 0.2 * end ? start : 0, end];
    if (!(x1 > x0)) { x1 = x0 + 1; }
    const inView = [], drawsBand = !state.smooth;
    lines.forEach((line, i) => { lines[i] = thinned(line, x0, x1, w); });
    for (const line of lines) for (let i = line.from; i <= line.to; i++) {
      if (line.x[i] < x0 || line.x[i] > x1 || line.y[i] === null) continue;
      inView.push(line.y[i]);
      if (drawsBand && line.low) inView.push(line.low[i], line.high[i]);
    }
    const isLog = (big && state.log || logarithmic) && inView.every(value => value > 0);
    let [y0, y1] = isLog ? [Math.min(...inView), Math.max(...inView)] : range(inView, big);
    if (isLog) { if (y0 === y1) { y0 /= 1.5; y1 *= 1.5; } } else {
      const pad = 0.06 * (y1 - y0);
      y1 += pad; y0 = y0 >= 0 && y0 - pad < 0.15 * (y1 - y0) ? 0 : y0 - pad;
    }
    const fx = x => left + (x - x0) / (x1 - x0) * w;
    const fy = isLog ? y => top + h - (Math.log(y) - Math.log(y0)) / (Math.log(y1) - Math.log(y0)) * h : y => top + h - (y - y0) / (y1 - y0) * h;
    scale = { x0, x1, left, w, top, h, lines, fx, fy };
    const label = (value, all, shown = format) => { const step = Math.abs(all[1] - all[0]) || 1; return shown(Math.abs(value) < step / 1e6 ? 0 : value, Math.max(2, Math.min(6, Math.ceil(Math.log10(Math.abs(value) / step + 1)) + 1))); };
    const yt = isLog ? logTicks(y0, y1) : ticks(y0, y1, big ? 6 : 4);
    for (const t of yt) { plot.append(svg("line", { class: "gridline", x1: left, x2: width - right, y1: fy(t), y2: fy(t) }), svg("text", { x: left - 7, y: fy(t) + 4, "text-anchor": "end" }, label(t, isLog ? [0, t] : yt))); }
    const inMinutes = state.x === "hours" && x1 < 1.5, factor = inMinutes ? 60 : 1;
    const xt = ticks(x0 * factor, x1 * factor, Math.max(2, Math.floor(w / 90)));
    xt.forEach(t => { const x = fx(t / factor); plot.append(svg("text", { x, y: height - 6, "text-anchor": x > width - 30 ? "end" : "middle" }, label(t, xt, number) + (state.x === "hours" ? inMinutes ? " min" : " h" : ""))); });
    plot.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: top + h, y2: top + h }));
    const id = `clip${charts.indexOf(self)}`, clip = svg("clipPath", { id });
    clip.append(svg("rect", { x: left, y: top - 2, width: w + 8, height: h + 4 }));
    const body = svg("g", { "clip-path": `url(#${id})` });
    plot.append(clip, body);
    if (big) for (const run of visible()) for (const mark of runs[run].marks) {
      const x = mark[state.x] ?? mark.step;
      if (x >= x0 && x <= x1) body.append(svg("line", { class: `event ${mark.kind === "nonfinite" ? "bad" : mark.kind}`, x1: fx(x), x2: fx(x), y1: mark.kind === "restart" ? top : top + h - 14, y2: top + h }));
    }
    for (const line of lines) drawLine(body, line, fx, fy, [top, top + h], drawsBand);
    const cursor = svg("line", { class: "cursor", y1: top, y2: top + h, visibility: "hidden" });
    const brush = svg("rect", { class: "brush", y: top, height: h, visibility: "hidden" });
    plot.append(brush, cursor);
    self.cursor = cursor; self.brush = brush;
    const ends = lines.filter(line => !line.dashed && line.run === lines[0].run), final = line => { const all = line.isPoints ? line.raw : series(line.key, line.run).mean; return [...all].reverse().find(value => value !== null); };
    last.replaceChildren(...(many || ends.length !== 1 ? [unit] : [el("span", { className: "last", text: format(final(ends[0])) }), unit ? ` ${unit}` : ""]));
  }
  function nearest(line, x) {
    let low = 0, high = line.x.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] < x) low = middle; else high = middle; }
    return Math.abs(line.x[low] - x) <= Math.abs(line.x[high] - x) ? low : high;
  }
  const valueAt = event => { const box = plot.getBoundingClientRect(); return scale.x0 + (event.clientX - box.left - scale.left) / scale.w * (scale.x1 - scale.x0); };
  let from = null;
  plot.addEventListener("pointermove", event => {
    if (!scale) return;
    const x = Math.min(scale.x1, Math.max(scale.x0, valueAt(event)));
    if (from !== null) { const [a, b] = [from, x].sort((p, q) => p - q); for (const [name, value] of [["x", scale.fx(a)], ["width", scale.fx(b) - scale.fx(a)], ["visibility", "visible"]]) self.brush.setAttribute(name, value); }
    for (const other of charts) other.showCursor(x);
    const rows = [], seen = new Set();
    for (const line of scale.lines) {
      const i = nearest(line, x), value = line.raw[i];
      if (value === null || value === undefined || (line.isPoints && Math.abs(line.x[i] - x) > (scale.x1 - scale.x0) * 0.03)) continue;
      const name = [many ? runs[line.run].name : null, keys.length + points.length > 1 ? line.key : null].filter(Boolean).join(" · ") || title;
      const spread = line.low && line.low[i] !== line.high[i] ? ` (${format(line.low[i])} to ${format(line.high[i])})` : "";
      rows.push(el("div", {}, el("i", { className: "dot", style: color(line.run) }), ` ${name} `, el("b", { text: format(value, 5) }), el("span", { className: "range", text: spread })));
      if (!seen.has(line.run)) { seen.add(line.run); if (seen.size === 1) rows.unshift(el("div", { className: "x", text: where(line, i) })); }
    }
    showTip(event, rows);
  });
  function where(line, i) {
    const at = line.isPoints ? runs[line.run].curves.points[line.key] : runs[line.run].curves.axes;
    if (!line.isPoints) i = Math.max(0, xOf(line.run).indexOf(line.x[i]));
    return ["step", "tokens", "flops", "hours"].filter(name => at[name]).map(name => atAxis(at[name][i], name)).join(" · ");
  }
  plot.addEventListener("pointerleave", () => { hideTip(); for (const other of charts) other.showCursor(null); });
  plot.addEventListener("pointerdown", event => { if (event.pointerType === "mouse" && event.button === 0) { from = valueAt(event); plot.setPointerCapture(event.pointerId); event.preventDefault(); } });
  plot.addEventListener("pointerup", event => {
    if (from === null) return;
    const [a, b] = [from, valueAt(event)].sort((p, q) => p - q);
    from = null; self.brush.setAttribute("visibility", "hidden");
    if (b - a > (scale.x1 - scale.x0) * 0.01) { state.zoom = [Math.max(a, scale.x0), Math.min(b, scale.x1)]; drawAll(); }
  });
  plot.addEventListener("dblclick", () => { state.zoom = null; drawAll(); });
  self.showCursor = x => {
    if (!scale || !self.cursor) return;
    const isIn = x !== null && x >= scale.x0 && x <= scale.x1;
    self.cursor.setAttribute("visibility", isIn ? "visible" : "hidden");
    if (isIn) { self.cursor.setAttribute("x1", scale.fx(x)); self.cursor.setAttribute("x2", scale.fx(x)); }
  };
  return card;
}
// Where a line has more points in view than there are pixels, neighbours become one point with a band around it.
function thinned(line, x0, x1, width) {
  let from = Math.max(0, line.x.findIndex(x => x >= x0) - 1), to = line.x.length - 1;
  while (to > from && line.x[to - 1] > x1) to--;
  const size = Math.ceil((to - from + 1) / width * 1.5);
  if (size < 2 || line.isPoints) return { ...line, from, to };
  const found = { ...line, x: [], y: [], raw: [], low: [], high: [], from: 0 };
  for (let i = from; i <= to; i += size) {
    let y = 0, raw = 0, n = 0, low = Infinity, high = -Infinity;
    const stop = Math.min(to, i + size - 1);
    for (let k = i; k <= stop; k++) {
      if (line.y[k] === null) continue;
      y += line.y[k]; raw += line.raw[k]; n++;
      low = Math.min(low, line.low ? line.low[k] : line.raw[k]); high = Math.max(high, line.high ? line.high[k] : line.raw[k]);
    }
    found.x.push(line.x[stop]);
    for (const [name, value] of Object.entries({ y: y / n, raw: raw / n, low, high })) found[name].push(n ? value : null);
  }
  found.to = found.x.length - 1;
  return found;
}
function drawLine(body, line, fx, fy, [top, floor], drawsBand) {
  const style = color(line.run), { from, to } = line;
  const inside = y => Math.min(floor + 40, Math.max(top - 40, y));
  const path = values => {
    let text = "", pen = "M";
    for (let i = from; i <= to; i++) { if (values[i] === null) { pen = "M"; continue; } text += `${pen}${fx(line.x[i]).toFixed(1)} ${inside(fy(values[i])).toFixed(1)}`; pen = "L"; }
    return text;
  };
  if (line.low && drawsBand) {
    let piece = [];
    const flush = () => { if (piece.length > 1) body.append(svg("path", { class: "band", style, d: "M" + piece.map(i => `${fx(line.x[i]).toFixed(1)} ${inside(fy(line.high[i])).toFixed(1)}`).join("L") + "L" + piece.reverse().map(i => `${fx(line.x[i]).toFixed(1)} ${inside(fy(line.low[i])).toFixed(1)}`).join("L") + "Z" })); piece = []; };
    for (let i = from; i <= to; i++) { if (line.low[i] === null) flush(); else piece.push(i); }
    flush();
  }
  if (state.smooth && !line.isPoints) body.append(svg("path", { class: "curve faint", style, d: path(line.raw) }));
  body.append(svg("path", { class: line.dashed ? "curve dashed" : "curve", style, d: path(line.y), opacity: line.which ? 0.55 : 1 }));
  let marks = 0;
  for (let i = from; i <= to; i++) {
    if (line.y[i] === null) continue;
    const x = fx(line.x[i]), y = fy(line.y[i]), most = fy(drawsBand && line.high ? line.high[i] : line.y[i]);
    if (line.isPoints && to - from < 70) body.append(svg("circle", { class: "knot", style, cx: x, cy: y, r: 3 }));
    if (most < top - 1 && marks++ < 60) body.append(svg("path", { class: "clip", style, d: `M${x - 4} ${top + 5}L${x + 4} ${top + 5}L${x} ${top - 1}Z` }));
    const least = fy(drawsBand && line.low ? line.low[i] : line.y[i]);
    if (least > floor + 1 && marks++ < 60) body.append(svg("path", { class: "clip", style, d: `M${x - 4} ${floor - 5}L${x + 4} ${floor - 5}L${x} ${floor + 1}Z` }));
  }
}
function showTip(event, rows) {
  if (!rows.length) return hideTip();
  tip.replaceChildren(...rows); tip.style.display = "block";
  const box = tip.getBoundingClientRect(), x = event.clientX + 16, y = event.clientY + 16;
  tip.style.left = `${Math.max(6, x + box.width > innerWidth - 6 ? event.clientX - box.width - 16 : x)}px`;
  tip.style.top = `${Math.max(6, y + box.height > innerHeight - 6 ? event.clientY - box.height - 16 : y)}px`;
}
function hideTip() { tip.style.display = "none"; }
function drawAll() { for (const one of charts) one.draw(); for (const redraw of redraws) redraw(); }

// ---- experts: heat maps on a logarithmic scale around the mean
function rgb(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number); }
function heatMap() {
  const with_ = runs.map((run, i) => i).filter(i => runs[i].experts);
  if (!with_.length) return null;
  const decoded = new Map(), canvas = el("canvas", { role: "img", "aria-label": "load of experts" });
  const rows = el("div", { className: "rows" }), columns = el("div", { className: "columns" }), title = el("h3");
  const ofRun = el("select", { "aria-label": "run", onchange: fill }, ...with_.map(i => el("option", { value: i, text: runs[i].name })));
  const view = el("select", { "aria-label": "view", onchange: draw });
  let shown = null;
  const experts = () => runs[Number(ofRun.value)].experts;
  function load(layer) { // one array a layer: multiples of the mean, [expert][column]
    const key = `${ofRun.value}/${layer}`;
    if (!decoded.has(key)) decoded.set(key, Float32Array.from(atob(experts().load[layer]), c => c.charCodeAt(0) ? 2 ** ((c.charCodeAt(0) - 128) / 24) : 0));
    return decoded.get(key);
  }
  function fill() {
    const found = experts(), options = [];
    if (found.steps.length > 1) options.push(["busiest", "Busiest expert of each layer, over time"]);
    options.push(["all", found.steps.length > 1 ? "Every expert of every layer, whole run" : "Every expert of every layer"]);
    if (found.steps.length > 1) found.busiest.forEach((_, layer) => options.push([layer, `Experts of MoE layer ${layer}, over time`]));
    view.replaceChildren(...options.map(([value, text]) => el("option", { value, text })));
    draw();
  }
  function draw() {
    const found = experts(), n = found.steps.length, kind = view.value;
    if (kind === "busiest") shown = { values: found.busiest, row: "layer", steps: true };
    else if (kind === "all") shown = { row: "layer", column: "expert", values: found.load.map((_, layer) => Array.from({ length: found.num_experts }, (_, e) => { const all = load(layer); let sum = 0; for (let c = 0; c < n; c++) sum += all[e * n + c]; return sum / n; })) };
    else shown = { row: "expert", steps: true, layer: kind, values: Array.from({ length: found.num_experts }, (_, e) => Array.from(load(kind).slice(e * n, e * n + n))) };
    const R = shown.values.length, C = shown.values[0].length;
    canvas.width = C; canvas.height = R; canvas.style.height = `${Math.max(90, Math.min(460, R * 18))}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(C, R), [cold, neutral, warm] = ["--cold", "--neutral", "--warm"].map(rgb);
    shown.values.forEach((row, r) => row.forEach((value, c) => {
      const share = value > 0 ? Math.max(-1, Math.min(1, Math.log2(value) / 2)) : -1, end = share > 0 ? warm : cold, part = Math.abs(share), at = 4 * (r * C + c);
      for (let k = 0; k < 3; k++) image.data[at + k] = neutral[k] + (end[k] - neutral[k]) * part;
      image.data[at + 3] = 255;
    }));
    context.putImageData(image, 0, 0);
    rows.replaceChildren(el("span", { text: `${shown.row} 0` }), el("span", { text: R > 1 ? R - 1 : "" }));
    const ends = shown.steps ? [`step ${found.first_step}`, `step ${found.steps[n - 1]}`] : ["expert 0", C > 1 ? `expert ${C - 1}` : ""];
    columns.replaceChildren(...ends.map(text => el("span", { text })));
    title.textContent = "Tokens of an expert, as a multiple of the mean of its layer";
  }
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), found = experts();
    const c = Math.min(canvas.width - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * canvas.width)));
    const r = Math.min(canvas.height - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * canvas.height)));
    const first = c ? found.steps[c - 1] + 1 : found.first_step;
    const at = shown.steps ? `steps ${first} to ${found.steps[c]}` : `expert ${c}`;
    const what = shown.layer === undefined ? `MoE layer ${r}` : `MoE layer ${shown.layer}, expert ${r}`;
    showTip(event, [el("div", { className: "x", text: `${what} · ${at}` }), el("div", {}, el("b", { text: `${number(shown.values[r][c], 3)} ×` }), ` the mean${view.value === "busiest" ? ", busiest expert" : ""}`)]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  fill();
  const scale = el("span", { className: "scale" }, "¼", el("i"), "4 ×");
  return el("div", { className: "card" }, el("div", { className: "tools" }, title, with_.length > 1 ? ofRun : null, view, scale), el("div", { className: "heat" }, rows, canvas, columns));
}

// ---- tables, facts, time
function table(head, lines, options = {}) {
  const cell = (tag, value) => { const isNumber = typeof value === "object" && value !== null && "number" in value; return el(tag, { className: isNumber ? `number ${value.best ? "best" : ""}` : value && value.className || "", style: isNumber && value.style || null }, ...(isNumber && value.style ? [el("i", { className: "dot" }), " "] : []), isNumber ? value.number : value && value.text !== undefined ? value.text : value); };
  return el("div", { className: `card scroll ${options.className || ""}` }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map(one => cell("th", one)))), el("tbody", {}, ...lines.map(line => el("tr", { className: line.className || "" }, ...(line.cells || line).map(one => cell("td", one)))))));
}
function summary(run) { // [label, value, what is below it, number to compare, which is better]
  const f = run.facts, t = run.time;
  const params = f.parameters ? [["parameters", number(f.parameters, 4), f.active_parameters !== f.parameters ? `${number(f.active_parameters, 4)} active` : "dense"]] : [];
  return [
    ...(many ? [["steps", count(f.step) + (f.planned_steps ? ` of ${count(f.planned_steps)}` : ""), ""]] : []),
    ["loss", number(f.loss, 4), f.step ? `at step ${count(f.step)}${f.planned_steps ? ` of ${count(f.planned_steps)}` : ""}` : "no step yet", f.loss, -1],
    ["validation loss", number(f.valid_loss, 4), f.best_valid_loss !== null ? `best ${number(f.best_valid_loss, 4)}` : "", f.valid_loss, -1],
    ["tokens", number(f.tokens, 4), f.flops ? `${number(f.flops, 3)} FLOPs` : ""], ...params,
    ["tokens/s", number(f.tokens_per_second, 4), `${f.devices ? `${f.devices} device${f.devices > 1 ? "s" : ""}, ` : ""}step ${duration(f.step_time_s)}`, f.tokens_per_second, 1],
    f.mfu !== null ? ["MFU", percent(f.mfu), `${number(f.tflops_per_device, 3)} TFLOP/s a device`, f.mfu, 1] : ["TFLOP/s a device", number(f.tflops_per_device, 3), "peak unknown", f.tflops_per_device, 1],
    ["training time", duration(f.training_s), t ? `of ${duration(t.whole_s)}` : ""],
    ["ETTR", t ? percent(t.ettr) : "–", t ? `${t.starts.length - 1} restart${t.starts.length === 2 ? "" : "s"}` : "no times of day", t && t.ettr, 1],
    ...(f.peak_memory_gib !== null ? [["peak memory", `${number(f.peak_memory_gib, 3)} GiB`, "rank 0", f.peak_memory_gib, -1]] : []),
    ...(f.skipped || f.nonfinite ? [["updates left out", number(f.skipped), `${f.nonfinite} lines with a number not finite`]] : []),
    ...f.rollbacks.map(one => ["rollback", `step ${one.at_step} to ${one.to_step}`, `${one.usual_loss !== undefined ? `loss ${number(one.loss, 4)} after a median of ${number(one.usual_loss, 4)}, deviation ${number(one.spread, 2)}` : `${one.skipped_in_a_row} updates in a row left out`}; skipped steps ${one.first_skipped} to ${one.last_skipped}`]),
  ];
}
function factsOf() {
  if (!many) return el("div", { className: "facts" }, ...summary(runs[0]).map(([label, value, below]) => el("div", { className: "fact" }, el("span", { text: label }), el("b", { text: value }), el("small", { text: below, title: below }))));
  const all = runs.map(summary), labels = [...new Set(all.flat().map(one => one[0]))];
  const lines = labels.map(label => {
    const found = all.map(one => one.find(line => line[0] === label)), values = found.filter(one => one && typeof one[3] === "number").map(one => one[3]);
    const best = values.length > 1 && Math.min(...values) !== Math.max(...values) ? (found.find(one => one)[4] > 0 ? Math.max(...values) : Math.min(...values)) : null;
    return [{ text: label, className: "name" }, ...found.map(one => ({ number: one ? `${one[1]}` : "–", best: one && best !== null && one[3] === best }))];
  });
  return el("div", { style: "margin-top: 20px" }, table(["", ...runs.map((run, i) => ({ number: run.name, style: color(i) }))], lines));
}
const SPENT = { "steps": "var(--r2)", "waiting for data": "var(--r6)", "validation, checkpoints, checks": "var(--r0)", "starts": "var(--r5)", "lost work": "var(--r1)", "stopped": "var(--r7)", "other": "var(--line)" };
function timeSection() {
  const timed = runs.map((run, i) => i).filter(i => runs[i].time);
  if (!timed.length) return [];
  const bars = timed.map(i => {
    const { seconds, whole_s, starts } = runs[i].time, parts = Object.entries(seconds).filter(([, s]) => s > whole_s * 5e-4);
    return el("div", { className: "spent" }, many ? el("h3", { text: runs[i].name }) : null,
      el("div", { className: "stack" }, ...parts.map(([name, s]) => el("div", { style: `flex: ${s / whole_s} 0 0; --c: ${SPENT[name]}`, title: `${name}: ${duration(s)}, ${percent(s / whole_s)}` }))),
      el("div", { className: "parts" }, ...parts.map(([name, s]) => el("span", {}, el("i", { className: "dot", style: `--c: ${SPENT[name]}` }), name, el("em", { text: `${duration(s)} · ${percent(s / whole_s)}` })))));
  });
  const lines = timed.flatMap(i => runs[i].time.starts.map((one, n) => [...(many ? [runs[i].name] : []), { text: n ? `restart ${n}` : "start" }, date(one.time), { number: count(one.step) }, { number: duration(one.start_s) }, { number: n ? (one.lost_steps ? `${one.lost_steps} (${duration(one.lost_s)})` : "0") : "" }, { number: n ? duration(one.stopped_s) : "" }]));
  const head = [...(many ? ["run"] : []), "process", "first step done", { number: "first step" }, { number: "start" }, { number: "steps lost" }, { number: "stopped before" }];
  return [el("p", { text: "Wall-clock time from the start of the first process to the last step. ETTR, the effective training time ratio, is the share of steps, waiting for data included." }), el("div", { className: "card", style: "margin-bottom: 14px" }, ...bars), table(head, lines.slice(0, 400), { className: "tall" })];
}
function savesSection() {
  const lines = runs.flatMap(run => run.checkpoints.map(one => [...(many ? [run.name] : []), { text: one.name, className: "mono" }, one.kind === "full" ? "full" : "weights only", { number: count(one.step) }, { number: one.num_bytes === null ? "–" : bytes(one.num_bytes) }, one.layout || "–", { text: one.warnings.join("; "), className: "warning" }]));
  const said = runs.filter(run => run.saves.count).map(run => `${many ? `${run.name}: ` : ""}${run.saves.count} saves committed, ${duration(run.saves.drain_s)} each (median); training waited ${duration(run.saves.stall_s)} for them in all.`);
  if (!lines.length && !said.length) return [];
  return [...said.map(text => el("p", { text })), ...(lines.length ? [table([...(many ? ["run"] : []), "checkpoint", "kind", { number: "step" }, { number: "size" }, "saved at", ""], lines, { className: "tall" })] : [])];
}
function configSection() {
  const withConfig = runs.filter(run => Object.keys(run.config).length);
  if (!withConfig.length) return [];
  const keys = [...new Set(withConfig.flatMap(run => Object.keys(run.config)))], value = (run, key) => run.config[key] ?? data.defaults[key] ?? "–";
  const differs = key => many ? new Set(withConfig.map(run => value(run, key))).size > 1 : data.defaults[key] !== undefined && value(runs[0], key) !== data.defaults[key];
  const only = el("input", { type: "checkbox", checked: keys.some(differs), onchange: fill }), search = el("input", { type: "search", placeholder: "filter options", oninput: fill, "aria-label": "filter options" });
  const host = el("div"), count = keys.filter(differs).length;
  function fill() {
    const kept = keys.filter(key => (!only.checked || differs(key)) && key.includes(search.value.trim().replaceAll("-", "_")));
    const columns = many ? withConfig : runs;
    const lines = kept.map(key => ({ className: differs(key) ? "differs" : "", cells: [{ text: key, className: "name mono" }, ...columns.map(run => ({ text: value(run, key), className: "value" })), ...(many ? [] : [{ text: data.defaults[key] ?? "–", className: "name" }])] }));
    host.replaceChildren(table(["option", ...columns.map(run => many ? run.name : "value"), ...(many ? [] : ["default"])], lines, { className: "tall" }));
  }
  fill();
  return [el("div", { className: "tools" }, el("label", {}, only, many ? `differences only (${count} of ${keys.length})` : `changed from the default only (${count} of ${keys.length})`), search), host];
}
function samplesSection() {
  const with_ = runs.filter(run => run.samples.length);
  if (!with_.length) return [];
  const steps = [...new Set(with_.flatMap(run => run.samples.map(one => one.step)))].sort((a, b) => a - b);
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, oninput: fill, "aria-label": "step", style: "width: min(320px, 60vw)" }), label = el("label"), host = el("div", { className: "grid" });
  function fill() {
    const step = steps[Number(slider.value)];
    label.textContent = `step ${count(step)}`;
    host.replaceChildren(...with_.flatMap(run => run.samples.filter(one => one.step === step).map(one => el("div", { className: "card" }, many ? el("h3", { text: run.name, style: `margin-bottom: 6px` }) : null, el("p", { className: "sample" }, el("em", { text: one.prompt }), one.text)))));
  }
  fill();
  return [el("div", { className: "tools" }, slider, label), host];
}
function evaluationSection() {
  const lines = runs.flatMap(run => Object.entries(run.evaluation).map(([name, one]) => [...(many ? [run.name] : []), name, ...["loss", "perplexity", "tokens"].map(key => ({ number: number(one[key], 5) }))]));
  return lines.length ? [table([...(many ? ["run"] : []), "set", { number: "loss" }, { number: "perplexity" }, { number: "tokens" }], lines)] : [];
}

// ---- the page
function section(title, children, note) {
  const found = children.filter(Boolean);
  if (!found.length) return;
  root.append(el("h2", { text: title }), ...(note ? [el("p", { text: note })] : []), ...found);
}
const isConstant = key => runs.every(run => { const line = run.curves.lines[key], all = line ? line.mean.concat(line.low || [], line.high || []) : []; return all.every(value => value === all[0]); });
function grid(list) { const found = list.filter(one => !one.hidesConstant || !isConstant(one.keys[0])).map(chart).filter(Boolean); return found.length ? [el("div", { className: "grid" }, ...found)] : []; }
function toolbar() {
  const names = Object.keys(AXES).filter(name => runs.some(run => run.curves.axes[name]));
  if (!names.length) return null;
  if (!names.includes(state.x)) state.x = names[names.length - 1];
  const tabs = names.map(name => el("button", { text: AXES[name], "aria-pressed": String(name === state.x), onclick: () => { state.x = name; state.zoom = null; drawAll(); } }));
  const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => { state.smooth = Number(smooth.value) && 1 - (1 - Number(smooth.value)) ** 1.5; drawAll(); } });
  const log = el("input", { type: "checkbox", onchange: () => { state.log = log.checked; drawAll(); } });
  const reset = el("button", { className: "reset", text: "reset zoom", hidden: true, onclick: () => { state.zoom = null; drawAll(); } });
  const legend = many ? el("div", { className: "runs" }, ...runs.map((run, i) => { const button = el("button", { "aria-pressed": "true", onclick: () => { state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i); button.setAttribute("aria-pressed", String(!state.hidden.has(i))); drawAll(); } }, el("i", { className: "dot", style: color(i) }), run.name); return button; })) : null;
  redraws.push(() => { reset.hidden = !state.zoom; tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(names[i] === state.x))); });
  return el("div", { className: "bar" }, legend, el("label", {}, "against", el("span", { className: "tabs" }, ...tabs)), el("label", {}, "smooth", smooth), el("label", {}, log, "logarithmic loss"), reset);
}
function lossChart() {
  const card = chart({ title: "Cross-entropy", keys: ["loss"], points: ["valid_loss"], unit: "nats a token", height: 360, big: true });
  if (!card) return null;
  const kinds = new Set(runs.flatMap(run => run.marks.map(mark => mark.kind))), key = el("div", { className: "key" });
  const add = (className, text) => key.append(el("span", {}, el("i", { className }), text));
  add("", "training");
  if (runs.some(run => run.curves.points.valid_loss)) add("dashed", "validation");
  if (runs.some(run => run.curves.axes.step && run.curves.axes.step.length > 1000)) add("band-key", "lowest to highest step");
  if (kinds.has("restart")) add("event-key", "restart");
  if (kinds.has("skipped")) add("event-key", "update left out");
  if (kinds.has("rollback")) add("event-key", "rollback");
  if (kinds.has("nonfinite")) add("event-key", "number not finite");
  card.append(key);
  return card;
}
const KNOWN = {
  "Optimization": [["lr", "Learning rate"], ["grad_norm", "Gradient norm, before clipping"], ["aux_loss", "Load-balancing loss"], ["z_loss", "Router z-loss"], ["global_batch_size", "Batch", "sequences"]],
  "Speed and memory": [["tokens_per_second_per_device", "Throughput", "tokens/s a device"], ["mfu", "Model FLOPs utilization", "", percent], ["tflops_per_device", "Model FLOPs", "TFLOP/s a device"], ["step_time_s", "Time of a step", "", duration], ["data_wait_share", "Share of a step spent waiting for data", "", percent], ["peak_memory_gib", "Peak memory, rank 0", "GiB"]],
};
function build() {
  const named = [...new Set(runs.flatMap(run => Object.keys(run.curves.points)))].filter(key => key !== "valid_loss").sort();
  const held = named.filter(key => key.startsWith("valid_loss/")), tasks = named.filter(key => key.startsWith("task/"));
  const shown = new Set(["loss", "router_entropy", "expert_load_max_over_mean", ...Object.values(KNOWN).flat().map(one => one[0])]);
  const others = [...new Set(runs.flatMap(run => [...Object.keys(run.curves.lines), ...Object.keys(run.curves.points)]))].filter(key => !shown.has(key) && key !== "valid_loss" && !held.includes(key) && !tasks.includes(key)).sort();
  const one = key => runs.some(run => run.curves.lines[key]) ? { title: key, keys: [key] } : { title: key, keys: [], points: [key] };

  root.append(el("div", { className: "eyebrow", text: many ? `Comparison of ${runs.length} runs` : "Training report" }), el("h1", { text: runs.map(run => run.name).join(", ") }),
    el("div", { className: "path", text: `${many ? "" : `${runs[0].folder} · `}last step ${date(Math.max(...runs.map(run => run.facts.last_wall_time || 0)))} · made ${data.made}` }));
  const notes = runs.flatMap(run => run.notes.map(note => many ? `${run.name}: ${note}` : note));
  if (notes.length) root.append(el("div", { className: "notes" }, ...notes.map(text => el("div", { text }))));
  root.append(factsOf());
  const bar = toolbar();
  if (bar) root.append(bar);
  const loss = lossChart();
  if (loss) root.append(loss);
  else root.append(el("p", { text: "No step was logged yet.", style: "margin-top: 24px" }));
  section("Validation sets", grid(held.map(key => ({ title: key.slice(11), keys: [], points: [key], unit: "nats a token" }))));
  section("Tasks", grid(tasks.map(key => ({ title: key.slice(5).replace("/", ": "), keys: [], points: [key] }))));
  section("Test sets", evaluationSection());
  for (const [title, list] of Object.entries(KNOWN)) section(title, grid(list.map(([key, text, unit, format]) => ({ ...one(key), title: text, unit, format, hidesConstant: key === "global_batch_size" }))));
  section("Where the time went", timeSection());
  section("Experts", [...grid([{ ...one("router_entropy"), title: "Router entropy, mean over layers", unit: "nats" }, { ...one("expert_load_max_over_mean"), title: "Busiest expert of the worst layer", unit: "× mean" }]), gap(heatMap())]);
  section("Other metrics", grid(others.slice(0, 60).map(one)));
  section("Samples", samplesSection());
  section("Checkpoints", savesSection());
  section("Configuration", configSection());
  section("Profile", runs.filter(run => run.profile).map(run => el("div", { className: "card scroll tall" }, many ? el("h3", { text: run.name }) : null, el("pre", { text: run.profile }))));
  root.append(el("footer", { text: `Optimus ${data.version} · drag over a curve to zoom, double-click to see all of it` }));
}
function gap(node) { if (node) node.style.marginTop = "14px"; return node; }
build();
drawAll();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
for (const kind of ["beforeprint", "afterprint"]) addEventListener(kind, drawAll);
document.documentElement.dataset.ready = "true";
