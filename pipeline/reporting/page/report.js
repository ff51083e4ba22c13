"use strict";
// The data: overview (a row for each model and device class), and the details, gzip in base64, opened when a model is selected.
const overview = JSON.parse(document.getElementById("overview").textContent);
const byId = (id) => document.getElementById(id);
const FAILED = ["failed", "rejected", "unstable"];
const VERDICTS = [...FAILED, "kept-previous", "kept-eager", "published"];
const MAX_EAGER_RATIO = 1.2; // of the eager latencies of two judges that count as alike
const ALL_AT_ONCE = 400; // models; of more, only those in view are in the document

const models = new Map();
for (const values of overview.data) {
  const row = Object.fromEntries(overview.columns.map((name, place) => [name, values[place]]));
  row.text = [row.model, row.device_class, row.verdict, row.recipe, row.code, row.reason].join(" ").toLowerCase();
  if (!models.has(row.model)) models.set(row.model, { name: row.model, place: models.size, cells: new Map() });
  models.get(row.model).cells.set(row.device_class, row);
}

// Elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== null) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(svg) {
  const made = element("div");
  made.innerHTML = svg; // of our own, with escaped names
  return made;
}

function drawing(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function table(heads, rows, caption) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col", class: text.startsWith("#") ? "n" : null }, text.replace("#", ""))));
  const body = rows.map(({ cells, won }) => element("tr", { class: won ? "won" : null }, ...cells.map((cell, place) =>
    element("td", { class: heads[place].startsWith("#") ? "n" : null, "data-head": heads[place].replace("#", "") }, ...[cell].filter(Boolean)))));
  return element("div", { class: "scroll" }, element("table", { "aria-label": caption }, element("thead", {}, head), element("tbody", {}, ...body)));
}

// Numbers

// A mark (~) says that the rounds were disturbed: their interval is not a bound.
const markOf = (clock) => (clock === "disturbed" ? "~" : "");
const times = (value, mark) => (typeof value === "number" ? `${mark}${value.toFixed(2)}×` : "");
const range = (mark, low, high) => (!mark && typeof low === "number" && typeof high === "number" ? `${low.toFixed(2)}–${high.toFixed(2)}` : "");
const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(3))) : value ?? "");
const megabytes = (value) => (typeof value === "number" ? `${short(value)} MB` : "");

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// The table of models

const state = { shown: [], rowHeight: 62 };

function cellOf(model, name) {
  const row = model.cells.get(name);
  if (!row) return element("td", { "data-class": name }, element("span", { class: "dim" }, "—"));
  const figures = [row.recipe === name ? "" : row.recipe, range(row.mark, row.speedup_ci_low, row.speedup_ci_high), typeof row.error_ratio === "number" ? `error ratio ${short(row.error_ratio)}` : "", megabytes(row.size_mb)];
  const link = element("a", { href: `#${encodeURIComponent(model.name)}/${name}`, title: row.reason || "", "data-class": name },
    element("span", { class: `verdict ${row.verdict}` }, verdictName(row)), ` ${row.clock === "none" ? "speed not measured" : times(row.speedup, row.mark)}`,
    element("span", { class: "dim" }, row.failed ? row.code ?? "" : figures.filter(Boolean).join(" · ")));
  return element("td", {}, link);
}

// What is published as portable serves where nothing better does.
const verdictName = (row) => {
  const note = row.device_class === "portable" ? "fallback" : row.accuracy;
  return row.verdict === "published" && note ? `published (${note})` : row.verdict;
};

// Eager runs alike in the judges of portable and of one CPU class; the others may limit the instruction set.
function unlikeEager(model) {
  const portable = model.cells.get("portable"), judged = [...model.cells.values()].filter((row) => row !== portable && !row.device_class.startsWith("cuda")
    && row.eager_p50_ms && row.num_threads === portable?.num_threads);
  const ratio = (row) => Math.max(row.eager_p50_ms / portable.eager_p50_ms, portable.eager_p50_ms / row.eager_p50_ms);
  const closest = judged.sort((one, other) => ratio(one) - ratio(other))[0];
  if (!closest || !portable.eager_p50_ms || ratio(closest) <= MAX_EAGER_RATIO) return null;
  return element("li", {}, `${model.name}: eager took ${short(closest.eager_p50_ms)} ms in the judge for ${closest.device_class}, and ${short(portable.eager_p50_ms)} ms in that for portable: `
    + "the machine was not equally fast, so compare speedups, not milliseconds");
}

const isWorse = (kind) => ["newly failing", "slower", "drifted"].includes(kind);

function wanted() {
  const text = byId("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const verdict = byId("verdict").value, name = byId("class").value;
  const fits = (row) => (!verdict || row.verdict === verdict) && (!name || row.device_class === name)
    && text.every((word) => row.text.includes(word));
  return [...models.values()].filter((model) => [...model.cells.values()].some(fits));
}

const SORTS = {
  catalog: (model) => model.place,
  speedup: (model) => -best(model, (row) => (row.failed || row.mark ? undefined : row.speedup)),
  error_ratio: (model) => -best(model, (row) => row.error_ratio),
  size_mb: (model) => -best(model, (row) => row.size_mb),
  build_s: (model) => -best(model, (row) => row.build_s),
  verdict: (model) => Math.min(...[...model.cells.values()].map((row) => VERDICTS.indexOf(row.verdict))),
};

function best(model, key) {
  const name = byId("class").value;
  const rows = name ? [model.cells.get(name)].filter(Boolean) : [...model.cells.values()];
  return Math.max(-Infinity, ...rows.map(key).filter((value) => typeof value === "number"));
}

function sorted(found) {
  const by = byId("sort").value;
  if (by === "model") return found.sort((one, other) => one.name.localeCompare(other.name));
  const keys = new Map(found.map((model) => [model, SORTS[by](model)]));
  return found.sort((one, other) => keys.get(one) - keys.get(other) || one.place - other.place);
}

function refresh() {
  state.shown = sorted(wanted());
  byId("shown").textContent = `${state.shown.length} of ${models.size} models`;
  for (const button of document.querySelectorAll(".count")) {
    button.setAttribute("aria-pressed", byId("verdict").value === button.dataset.verdict);
  }
  byId("models").style.setProperty("--classes", classesShown().length);
  drawHead();
  drawRows();
}

function classesShown() {
  const name = byId("class").value;
  return name ? [name] : overview.classes;
}

function drawHead() {
  const by = byId("sort").value, name = byId("class").value;
  const head = (label, sort, device) => {
    const on = by === sort && (device === undefined || name === device || overview.classes.length === 1);
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      byId("sort").value = on ? "catalog" : sort;
      refresh();
    });
    return element("th", { scope: "col", "aria-sort": on ? (sort === "model" ? "ascending" : "descending") : "none" }, button);
  };
  document.querySelector("#models thead").replaceChildren(
    element("tr", {}, head("model", "model"), ...classesShown().map((one) => head(one, "speedup", one))));
}

function drawRows(everything = false) {
  const body = document.querySelector("#models tbody"), count = state.shown.length, width = classesShown().length + 1;
  let first = 0, end = count;
  if (count > ALL_AT_ONCE && !everything) {
    state.rowHeight = body.querySelector("tr.item")?.getBoundingClientRect().height || state.rowHeight;
    const above = -body.getBoundingClientRect().top;
    const visible = Math.ceil(window.innerHeight / state.rowHeight);
    first = Math.max(0, Math.min(count - visible, Math.floor(above / state.rowHeight) - visible));
    end = Math.min(count, first + 3 * visible);
  }
  byId("models").classList.toggle("long", count > ALL_AT_ONCE);
  if (body.dataset.range === `${first} ${end} ${everything}` && body.shownRows === state.shown) return;
  body.dataset.range = `${first} ${end} ${everything}`;
  body.shownRows = state.shown;
  const focused = document.activeElement?.closest?.("#models a")?.getAttribute("href");
  const gap = (rows) => element("tr", { class: "gap", "aria-hidden": "true" }, element("td", { colspan: width, style: `height:${rows * state.rowHeight}px` }));
  byId("models").setAttribute("aria-rowcount", count + 1);
  body.replaceChildren(gap(first), ...state.shown.slice(first, end).map((model, place) =>
    element("tr", { class: "item", "aria-rowindex": first + place + 2 }, element("th", { scope: "row", title: model.name },
      element("a", { href: `#${encodeURIComponent(model.name)}` }, model.name)), ...classesShown().map((name) => cellOf(model, name)))), gap(count - end));
  if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

// Details of a model

let opened;

async function detailsOf(model) {
  if (!opened) {
    const packed = JSON.parse(byId("all-details").textContent);
    const bytes = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    opened = JSON.parse(await new Response(stream).text());
  }
  return opened[model.place];
}

async function show(name, device) {
  const model = models.get(name), dialog = byId("details");
  if (!model) return dialog.close();
  byId("d-title").textContent = name;
  const found = await detailsOf(model);
  const names = [...model.cells.keys()].sort((one, other) => (other === device) - (one === device));
  byId("d-body").replaceChildren(...names.map((one) => classSection(model, one, found)));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function classSection(model, name, found) {
  const row = model.cells.get(name), detail = found.classes[name], history = found.history[name] ?? [];
  const section = element("section", {}, element("h3", {}, `${name}: `, element("span", { class: `verdict ${row.verdict}` }, verdictName(row)),
    row.failed || !row.speedup ? "" : ` ${times(row.speedup, row.mark)} ${row.mark ? "" : `(${range("", row.speedup_ci_low, row.speedup_ci_high)}) `}by ${row.recipe}`));
  const add = (...parts) => section.append(...parts.filter(Boolean));
  if (row.reason) add(element("p", {}, row.code ? element("code", {}, row.code) : "", row.code ? " " : "", row.reason));
  if (found.serves[name]) {
    add(element("p", {}, `Machines of this class load ${found.serves[name] === name ? "it" : found.serves[name]}:`), copyable(loadCommand(model.name)));
  } else if (!row.failed) add(element("p", {}, "No artifact serves this class."));
  if (detail.log_tail) add(element("h4", {}, "End of the log"), element("pre", {}, element("code", {}, detail.log_tail)));
  if (detail.candidates.length) add(...contest(row, detail));
  if (history.length > 1) add(...past(history));
  add(element("p", { class: "dim" }, facts(row, detail)));
  return section;
}

function loadCommand(name) {
  return `model = freezer.load(${JSON.stringify(name)}, store=${JSON.stringify(overview.store)})`;
}

function copyable(text) {
  const button = element("button", { type: "button", class: "copy" }, "Copy");
  return element("pre", {}, element("code", {}, text), button);
}

function facts(row, detail) {
  const version = row.version ? `version ${row.version}` : "";
  return [`${detail.num_threads} thread${detail.num_threads === 1 ? "" : "s"}`, detail.host.cpu, detail.host.torch ? `torch ${detail.host.torch}` : "", `source ${detail.source}`,
    version, detail.artifact, row.cached ? "unchanged since an earlier campaign" : `built in ${duration(row.build_s)}, judged in ${duration(row.judge_s)}`,
    detail.objective ? `objective ${detail.objective}` : "", detail.clock ? `clock: ${detail.clock}` : ""].filter(Boolean).join(" · ");
}

function resultOf(candidate, row) {
  if (row.verdict === "failed") return "not judged"; // the judge failed as a whole
  return candidate.recipe === row.recipe && row.verdict === "published" ? "published" : "passes";
}

function contest(row, detail) {
  detail.candidates.sort((one, other) => (other.speedup ?? 0) - (one.speedup ?? 0));
  const parts = [element("h4", {}, "Contest"), table(
    ["recipe", "result", "#speedup", "#95% interval", "#p50 ms", "#error ratio", "#size", "#built in"],
    detail.candidates.map((one) => ({
      won: one.recipe === row.recipe && row.verdict === "published",
      cells: [one.recipe, one.problem ?? resultOf(one, row), times(one.speedup, markOf(detail.clock)), one.speedup_ci ? range(markOf(detail.clock), ...one.speedup_ci) : "",
        short(one.latency_ms?.p50), short(one.drift?.error_ratio), megabytes(one.size_bytes / 1e6 || null), duration(one.build_s)],
    })), "Candidates")];
  const spread = Object.entries(detail.deciles_ms ?? {});
  if (spread.length) parts.push(element("h4", {}, "Latencies"), boxes(spread));
  for (const one of detail.candidates) {
    const open = one.recipe === row.recipe && row.failed;
    const inner = [];
    if (one.points.length > 1) inner.push(table(["threads and sizes", "payload", "#eager ms", "#p50 ms", "#p90", "#p99", "#speedup", "#95% interval", "verdict"],
      one.points.map((at) => ({ cells: [at.place, at.payload.replace("payloads/", ""), short(at.eager_p50), short(at.p50), short(at.p90), short(at.p99), times(at.speedup, markOf(at.clock)), at.speedup_ci ? range(markOf(at.clock), ...at.speedup_ci) : "", at.verdict] })), "Threads and sizes"));
    if (one.outputs) inner.push(table(["output", "input set", "#error ratio", "#max abs error", "#SQNR dB", "problem"],
      one.outputs.map((at) => ({ cells: [at.output, `${at.set_index} (${at.kind})`, short(at.error_ratio), short(at.max_abs_err), short(at.sqnr_db), at.problem] })), "Drift"));
    if (one.explanation) inner.push(element("pre", {}, one.explanation), drawn(one.plot));
    if (one.freezing.length) inner.push(element("dl", {}, ...one.freezing.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])));
    if (inner.length) parts.push(element("details", open ? { open: "" } : {}, element("summary", {}, `${one.recipe}${one.capture && one.lowering ? ` (${one.capture} → ${one.lowering})` : ""}: drift, sizes and what freezing did`), ...inner));
  }
  return parts;
}

// As wide as the screen: text in a drawing that is scaled down cannot be read.
const drawingWidth = () => Math.max(280, Math.min(620, window.innerWidth - 70));

function boxes(spread) {
  const step = 24, width = drawingWidth(), left = width < 500 ? 130 : 170, high = Math.max(...spread.map(([, values]) => values[9])) * 1.05;
  const at = (value) => left + (Math.min(value, high) / high) * (width - left - 60);
  const made = drawing("svg", { viewBox: `0 0 ${width} ${spread.length * step + 4}`, width, role: "img", "aria-label": `Latencies in ms: ${spread.map(([name, values]) => `${name} median ${short(values[5])}`).join(", ")}` });
  spread.forEach(([name, values], place) => {
    const y = place * step + step / 2;
    const label = drawing("text", { x: left - 8, y: y + 4, "text-anchor": "end" });
    label.textContent = name;
    const value = drawing("text", { x: at(values[9]) + 6, y: y + 4 });
    value.textContent = `${short(values[5])} ms`;
    made.append(label, drawing("line", { class: "whisker", x1: at(values[1]), x2: at(values[9]), y1: y, y2: y }),
      drawing("rect", { class: "box", x: at(values[2]), y: y - 6, width: Math.max(1, at(values[8]) - at(values[2])), height: 12 }),
      drawing("line", { class: "mid", x1: at(values[5]), x2: at(values[5]), y1: y - 7, y2: y + 7 }), value);
  });
  made.append(drawing("line", { class: "axis", x1: left, x2: left, y1: 0, y2: spread.length * step }));
  return element("div", {}, made, element("p", { class: "legend" }, "line: 10% to 90% of calls, box: 20% to 80%, mark: median"));
}

function past(history) {
  const timed = history.filter((one) => one.speed);
  const parts = [element("h4", {}, "History")];
  if (timed.length > 1) parts.push(trend(timed));
  parts.push(table(["time", "verdict", "recipe", "#speedup", "#95% interval", "#error ratio", "#size", "#build", "torch", "change"],
    [...history].reverse().map((one) => ({
      cells: [one.time.slice(0, 16).replace("T", " "), one.version ? `${one.verdict} (version ${one.version})` : one.verdict, one.recipe, one.speed ? times(one.speed.value, one.speed.mark) : "", one.speed ? range(one.speed.mark, one.speed.low, one.speed.high) : "",
        short(one.error_ratio), megabytes(one.size_mb), duration(one.build_s), one.torch,
        one.change && one.change.kind !== "unchanged" ? element("span", { class: isWorse(one.change.kind) ? "worse" : "better" }, one.change.kind) : ""],
    })), "History"));
  return parts;
}

function trend(timed) {
  const width = drawingWidth(), height = 90, pad = 24, high = Math.max(...timed.map((one) => one.speed.value)) * 1.1;
  const x = (place) => pad + (place / (timed.length - 1)) * (width - 2 * pad), y = (value) => height - 16 - (value / high) * (height - 28);
  const made = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": `Speedups over time: ${timed.map((one) => one.speed.value.toFixed(2)).join(", ")}` });
  made.append(drawing("line", { class: "axis", x1: pad, x2: width - pad, y1: y(1), y2: y(1) }),
    drawing("polyline", { class: "trend", points: timed.map((one, place) => `${x(place)},${y(one.speed.value)}`).join(" ") }),
    ...timed.map((one, place) => drawing("circle", { class: isWorse(one.change?.kind) ? "dot worse" : "dot", cx: x(place), cy: y(one.speed.value), r: 4 })));
  const label = drawing("text", { x: pad, y: height - 2 });
  label.textContent = "speedup of what served; the line is eager";
  made.append(label);
  return made;
}

// Behaviour

function choose(id, names) {
  byId(id)?.append(...names.map((name) => element("option", { value: name }, name)));
}

function followHash() {
  const [name, device] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (models.has(name)) show(name, device);
  else if (byId("details").open) byId("details").close();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
choose("verdict", VERDICTS.filter((verdict) => overview.data.some((values) => values[overview.columns.indexOf("verdict")] === verdict)));
choose("class", overview.classes);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("filters").addEventListener("input", refresh);
for (const button of document.querySelectorAll(".count")) {
  button.addEventListener("click", () => {
    const select = byId("verdict"), value = button.dataset.verdict;
    select.value = select.value === value ? "" : value;
    refresh();
  });
}
document.addEventListener("click", async (event) => {
  if (!event.target.matches?.(".copy")) return;
  await navigator.clipboard?.writeText(event.target.previousElementSibling.textContent);
  event.target.textContent = "Copied";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.matches?.("input, select") && !byId("details").open) {
    event.preventDefault();
    byId("search").focus();
  }
});
byId("details").addEventListener("close", () => {
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
});
byId("details").addEventListener("click", (event) => {
  if (event.target === byId("details")) byId("details").close();
});
let waiting = false;
const redraw = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawRows();
  });
};
addEventListener("scroll", redraw, { passive: true });
addEventListener("resize", redraw);
addEventListener("beforeprint", () => drawRows(true));
addEventListener("afterprint", () => drawRows());
addEventListener("hashchange", followHash);
byId("unlike").append(...[...models.values()].map(unlikeEager).filter(Boolean));
refresh();
followHash();
