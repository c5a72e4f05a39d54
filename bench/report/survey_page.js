"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);
const unique = (values) => Array.from(new Set(values));
const number = new Intl.NumberFormat("en", {maximumSignificantDigits: 4, useGrouping: false});

// ---- tables: columns become rows
const tables = Object.fromEntries(Object.entries(data.tables).map(([name, columns]) => {
  const names = Object.keys(columns);
  const read = names.map((column) => {
    const {words, at, values} = columns[column];
    return words ? (place) => words[at[place]] : (place) => values[place];
  });
  const first = names.length ? columns[names[0]] : {values: []};
  const rows = (first.at || first.values).map((_, place) =>
    Object.fromEntries(names.map((column, i) => [column, read[i](place)])));
  return [name, rows];
}));
const picked = (rows, wanted) =>
  rows.filter((row) => Object.entries(wanted).every(([name, value]) => row[name] === value));

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function words(value) {
  if (value === null || value === undefined || value === "") return "-";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return Number.isInteger(value) || typeof value === "string" ? String(value) : number.format(value);
}

const LABELS = {
  op: "Op", form: "Form", m: "m", n: "n", k: "k", budget: "Budget", kernel: "Kernel", us: "us",
  plain_us: "Unquantized us", speedup: "Times as fast", least_us: "Least us", light: "Share of light",
  row_err: "Row error", note: "Note", letter: "Letter", kind: "Language", front: "On the line",
  state: "State", arithmetic: "Arithmetic", distribution: "Distribution", shapes: "Shapes",
  typical_row_err: "Row error, median shape", row_p99: "99 % of rows", count: "Count",
  mean_rel_err: "Mean relative error", mean_shift: "Mean shift", part: "Part",
};
const NUMBERS = new Set(["m", "n", "k", "us", "plain_us", "speedup", "least_us", "light", "row_err",
  "shapes", "typical_row_err", "row_p99", "count", "mean_rel_err", "mean_shift", "problems",
  "covered", "share", "untimed", "kernels", "rows", "fresh", "usable", "stale", "older", "missing"]);
const PAGE = 25;

// A table that sorts by any column and shows a page at a time.
class Grid {
  constructor(place, title, columns) {
    this.columns = columns;
    this.rows = [];
    this.from = 0;
    this.by = null;
    this.body = element("tbody");
    const head = columns.map((column) => {
      const button = element("button", {type: "button"}, LABELS[column] || column);
      const header = element("th", {scope: "col", "aria-sort": "none"}, button);
      if (NUMBERS.has(column)) header.className = "number";
      button.addEventListener("click", () => this.sort(column));
      return header;
    });
    this.headers = head;
    const table = element("table", {}, element("caption", {}, title),
      element("thead", {}, element("tr", {}, ...head)), this.body);
    this.said = element("output", {class: "faint", "aria-live": "polite"});
    this.back = element("button", {type: "button"}, "Previous");
    this.on = element("button", {type: "button"}, "Next");
    this.back.addEventListener("click", () => this.turn(-PAGE));
    this.on.addEventListener("click", () => this.turn(PAGE));
    place.replaceChildren(
      element("div", {class: "wide", tabindex: "0", role: "region", "aria-label": title}, table),
      element("div", {class: "pages"}, this.back, this.on, this.said));
  }

  show(rows) {
    this.rows = rows.slice();
    this.from = 0;
    this.order();
    this.fill();
  }

  turn(by) {
    this.from += by;
    this.fill();
  }

  sort(column) {
    const again = this.by && this.by.column === column && this.by.sign > 0;
    this.by = {column, sign: again ? -1 : 1};
    this.columns.forEach((name, i) => this.headers[i].setAttribute("aria-sort",
      name !== column ? "none" : this.by.sign > 0 ? "ascending" : "descending"));
    this.from = 0;
    this.order();
    this.fill();
  }

  order() {
    if (!this.by) return;
    const {column, sign} = this.by;
    this.rows.sort((first, second) => {
      const a = first[column], b = second[column];
      if (a === null || b === null) return (a === null) - (b === null); // what is unknown comes last
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a - b);
    });
  }

  fill() {
    const shown = this.rows.slice(this.from, this.from + PAGE);
    this.body.replaceChildren(...shown.map((row) => element("tr", {}, ...this.columns.map(
      (column) => {
        const text = words(row[column]);
        const parts = column === "kernel" ? text.split(/(?<=\+)/) : [text]; // compositions are long
        const pieces = parts.flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
        return element("td", {class: NUMBERS.has(column) ? "number" : column}, ...pieces);
      }))));
    this.back.disabled = this.from === 0;
    this.on.disabled = this.from + PAGE >= this.rows.length;
    const last = this.from + shown.length;
    this.said.textContent = shown.length
      ? `${this.from + 1} to ${last} of ${this.rows.length} rows` : "no rows";
  }
}

// ---- pictures: each with a sentence that says what it shows, and the same as a table
const COLUMNS = {
  winners: ["letter", "kernel", "m", "n", "k", "us", "plain_us", "speedup", "light", "row_err", "note"],
  light: ["kernel", "kind", "m", "n", "k", "us", "least_us", "row_err"],
  fronts: ["letter", "kernel", "us", "row_err", "front", "kind", "least_us", "state"],
  accuracy: ["arithmetic", "distribution", "typical_row_err", "row_err", "row_p99", "mean_rel_err",
    "mean_shift", "shapes"],
  coverage: ["part", "state", "count"],
  freshness: ["part", "state", "count"],
};
const grids = {};
const asked = {}; // the last drawing asked for of each picture: an older one that ends later is dropped

function tell(name, rows, sentence) {
  byId(`${name}-words`).textContent = sentence;
  const details = byId(`${name}-table`);
  if (!grids[name]) {
    grids[name] = new Grid(details.querySelector("div"), details.dataset.title, COLUMNS[name]);
  }
  grids[name].show(rows);
}

async function draw(place, spec, rows, canvas) {
  const turn = asked[place] = (asked[place] || 0) + 1;
  const box = byId(place);
  if (!rows.length) {
    box.replaceChildren(element("p", {class: "faint"}, "Nothing of this was measured."));
    return;
  }
  const inner = element("div", {class: "inner"});
  const whole = {...spec, data: {values: rows}};
  if (spec.width === "container") {
    whole.width = Math.max(box.clientWidth, 340);
    whole.autosize = {type: "fit-x", contains: "padding"};
  }
  const made = await vegaEmbed(inner, whole, {
    mode: "vega-lite", actions: false, ast: true, renderer: canvas ? "canvas" : "svg",
    config: data.themes[dark.matches ? "dark" : "light"].config,
  });
  if (asked[place] !== turn) return void made.finalize();
  box.replaceChildren(inner);
}

function legend(place, rows) {
  const hues = data.themes[dark.matches ? "dark" : "light"].hues;
  const known = new Map(rows.map((row) => [row.key, row]));
  byId(place).replaceChildren(...Array.from(known.keys()).sort().map((key) => {
    const row = known.get(key);
    const swatch = element("b", {}, key.split(" ")[0]);
    swatch.style.background = hues[row.hue];
    return element("li", {}, swatch, element("span", {}, row.kernel));
  }));
}

// ---- what is asked for
const form = byId("asked");
const value = (name) => form.elements[name].value;
const sizes = (row) => ["m", "n", "k"].filter((name) => row[name] !== null)
  .map((name) => `${name}=${row[name]}`).join(" ");

function options(select, values, wanted) {
  const kept = values.includes(wanted) ? wanted : values[0];
  select.replaceChildren(...values.map((each) => new Option(each, each, false, each === kept)));
}

function often(values) {
  const counts = new Map();
  for (const each of values) counts.set(each, (counts.get(each) || 0) + 1);
  return Array.from(counts).sort((a, b) => b[1] - a[1]).map(([each]) => each);
}

function renew(changed) {
  const op = data.ops.find((each) => each.op === value("op"));
  const first = changed === "op";
  const ofOp = picked(tables.choices, {op: op.op, budget: data.budgets[0]});
  if (first) {
    options(form.elements.form, often(ofOp.map((row) => row.form)), op.form);
    form.elements.budget.value = op.budget;
  }
  if (first || changed === "form") {
    const rows = ofOp.filter((row) => row.form === value("form"));
    const rowsOfM = rows.map((row) => row.m);
    const wanted = first ? op.m : rowsOfM.includes(Number(value("m"))) ? Number(value("m")) : often(rowsOfM)[0];
    options(form.elements.m, unique(rowsOfM).sort((a, b) => a - b).map(String), String(wanted));
    const shape = first ? sizes({m: op.shape[0], n: op.shape[1], k: op.shape[2]}) : "";
    options(form.elements.shape, unique(rows.map(sizes)), shape);
  }
  byId("m-label").hidden = op.axes[0] === "m";
}

const share = (part, all) => `${part} of ${all}`;

function showMaps(op) {
  const one = op.axes[0] === "m";
  const wanted = {op: op.op, form: value("form"), budget: value("budget")};
  if (!one) wanted.m = Number(value("m"));
  const rows = picked(tables.choices, wanted);
  const answered = rows.filter((row) => row.answered);
  const names = often(answered.map((row) => row.kernel));
  const within = value("budget") === "none" ? "without a budget" : `within ${value("budget")}`;
  const at = one ? "" : ` at m=${value("m")}`;
  let said = `${op.op}${at} ${within}: dispatch answers at ${share(answered.length, rows.length)} shapes`;
  if (names.length) {
    const count = answered.filter((row) => row.kernel === names[0]).length;
    said += `, most often with ${names[0]} (${count})`;
  }
  const known = rows.filter((row) => row[op.gain] !== null);
  if (known.length) {
    const best = known.reduce((a, b) => (a[op.gain] >= b[op.gain] ? a : b));
    const most = op.gain === "light" ? `${Math.round(100 * best.light)} %` : best.speedup.toFixed(2);
    const gain = data.gains[op.gain].replace("share of", "of");
    said += `; the best is ${most} ${gain}, at ${sizes(best)}`;
  }
  tell("winners", rows, `${said}.`);
  byId("status").textContent = `${said}.`;
  byId("gains-title").textContent = `What it gains: ${data.gains[op.gain]}`;
  legend("winners-legend", rows);
  draw("winners", data.charts[op.op].winners, rows);
  draw("gains", data.charts[op.op].gains, known);
}

function showLight(op) {
  const rows = picked(tables.times, {op: op.op, form: value("form")});
  const near = rows.filter((row) => row.us <= data.line * row.least_us).length;
  const said = `${rows.length} times of ${op.op}; ${near} within ${data.line} times of the least (below the dashed line).`;
  tell("light", rows, said);
  draw("light", data.charts[op.op].light, rows, true);
}

function showFronts(op) {
  const all = picked(tables.times, {op: op.op, form: value("form")});
  const rows = all.filter((row) => sizes(row) === value("shape"));
  const seen = rows.filter((row) => row.row_err !== null);
  const front = seen.filter((row) => row.front).sort((a, b) => a.us - b.us);
  const blind = rows.length - seen.length;
  let said = front.length
    ? `At ${value("shape")} no kernel is both faster and more accurate than ` +
      front.map((row) => `${row.kernel} (${words(row.us)} us, ${words(row.row_err)})`).join(", ")
    : `At ${value("shape")} no error is known`;
  if (blind) said += `; ${blind} kernels without a known error are in the table only`;
  tell("fronts", rows, `${said}.`);
  legend("fronts-legend", seen);
  draw("fronts", data.charts[op.op].fronts, seen);
}

function showAccuracy(op) {
  const rows = picked(tables.errors, {op: op.op});
  const which = value("which");
  const field = which === "worst" ? "row_err" : "typical_row_err";
  let said = "No errors are stored under this op.";
  if (rows.length) {
    const most = rows.reduce((a, b) => (a[field] >= b[field] ? a : b));
    said = `${unique(rows.map((row) => row.arithmetic)).length} kinds of arithmetic on ` +
      `${unique(rows.map((row) => row.distribution)).length} distributions; the largest is ` +
      `${words(most[field])}, of ${most.arithmetic} on ${most.distribution}.`;
  }
  tell("accuracy", rows, said);
  draw("accuracy", data.charts[op.op][which], rows);
}

function showHeld() {
  for (const name of ["coverage", "freshness"]) {
    const rows = tables[name];
    const counts = {};
    for (const row of rows) {
      if (row.part.startsWith("suite ")) continue;
      counts[row.state] = (counts[row.state] || 0) + row.count;
    }
    const what = name === "coverage" ? "problems" : "rows";
    const said = `Of the ${what} of all ops: ${Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ")}.`;
    tell(name, rows, said);
    draw(name, data.charts[""][name], rows);
  }
}

function showAll(changed) {
  const op = data.ops.find((each) => each.op === value("op"));
  if (["op", "form", "m", "budget", ""].includes(changed)) showMaps(op);
  if (["op", "form", ""].includes(changed)) showLight(op);
  if (["op", "form", "shape", ""].includes(changed)) showFronts(op);
  if (["op", "which", ""].includes(changed)) showAccuracy(op);
  if (changed === "") showHeld();
}

// ---- the table of choices, which is filtered by itself
const filters = byId("filters");
const choices = new Grid(byId("choices"), "Choices of dispatch", ["op", "form", "m", "n", "k",
  "kernel", "us", "plain_us", "speedup", "light", "row_err", "note"]);

function filter() {
  const wanted = new FormData(filters);
  const text = wanted.get("text").toLowerCase();
  const m = wanted.get("m");
  choices.show(tables.choices.filter((row) =>
    (!wanted.get("op") || row.op === wanted.get("op")) &&
    row.budget === wanted.get("budget") &&
    (!m || row.m === Number(m)) &&
    (!wanted.get("answer") || String(row.answered) === wanted.get("answer")) &&
    (!text || `${row.kernel} ${row.form} ${row.note}`.toLowerCase().includes(text))));
}

// ---- begin
for (const each of data.ops) {
  form.elements.op.append(new Option(`${each.op} (${each.problems})`, each.op));
  filters.elements.op.append(new Option(each.op, each.op));
}
for (const word of data.budgets) {
  form.elements.budget.append(new Option(word, word));
  filters.elements.budget.append(new Option(word, word, false, word === data.budget));
}
for (const m of unique(tables.choices.map((row) => row.m)).sort((a, b) => a - b)) {
  filters.elements.m.append(new Option(m, m));
}
const largest = data.ops.reduce((a, b) => (b.problems > a.problems ? b : a), data.ops[0]);
if (largest) {
  form.elements.op.value = largest.op;
  renew("op");
  showAll("");
}
const holdings = new Grid(byId("holdings"), "What is held of each op and suite",
  Object.keys(data.tables.holdings));
holdings.show(tables.holdings);
filter();
choices.sort("speedup");
choices.sort("speedup"); // the largest first

form.addEventListener("change", (event) => {
  renew(event.target.name);
  showAll(event.target.name);
});
for (const each of [form, filters]) each.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("input", filter);
dark.addEventListener("change", () => showAll(""));
let width = window.innerWidth;
let waiting = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(() => showAll(""), 200);
});
