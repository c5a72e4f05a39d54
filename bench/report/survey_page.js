"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const asked = document.forms.asked.elements;
const flags = new Map([["yes", true], ["no", false]]);

function valueOf(cell, head) {
  const text = cell.textContent.trim(); // the last cell of a row ends with its line
  return head.className !== "number" ? flags.get(text) ?? text : text === "-" ? null : Number(text);
}

function rowsOf(table) {
  const heads = Array.from(table.rows[0].cells);
  return Array.from(table.querySelectorAll("tbody tr:not(.form)"), (row) => Object.fromEntries([
    ["form", row.parentNode.dataset.form],
    ...heads.map((head, i) => [head.dataset.name, valueOf(row.cells[i], head)])]));
}

function tablesOf(op) { // the rows of tables are the data of pictures
  const tables = Array.from(document.querySelectorAll("table")).filter((table) => table.dataset.of === op);
  return Object.fromEntries(tables.map((table) => [table.dataset.name, rowsOf(table)]));
}

// Maps as wide as the page at most, and their texts only as large as a cell holds.
function fitted(view, step) {
  if (Array.isArray(view)) return view.map((part) => fitted(part, step));
  if (view === null || typeof view !== "object") return view;
  const parts = Object.entries(view).map(([name, part]) =>
    [name, ["vconcat", "layer"].includes(name) ? fitted(part, step) : part]);
  const found = Object.fromEntries(parts);
  if (/_map$/.test(view.name ?? "")) {
    if (view.name === "errors_map") step = Math.min(view.width.step, (room() / 2 - LABELS) / DISTRIBUTIONS);
    const size = Math.min(12, step / {winners_map: 1, gains_map: 2.5, errors_map: 3}[view.name]);
    found.width = {step};
    found.layer.at(-1).mark = {...found.layer.at(-1).mark, type: "text", fontSize: size, opacity: size < 6 ? 0 : 1};
  } else if (typeof view.width === "number") {
    const labels = view.height?.step ? room() / 2 + 20 : LABELS; // of rows with names, or numbers
    found.width = Math.min(view.width, Math.max(room() - labels, LABELS));
  }
  return found;
}
const LABELS = 112; // pixels beside a map, for labels of its rows
const DISTRIBUTIONS = 13; // at most, beside labels on half of the width
const room = () => document.getElementById("pictures").clientWidth;
const stepOf = (op) => Math.min(data.cell, (room() - LABELS) / (data.columns[op] ?? 1));

const themed = (theme) => ({...theme, axis: {...theme.axis, labelLimit: Math.min(theme.axis.labelLimit, room() / 2 - 16)}});

const draw = (place, op) => vegaEmbed(place, {...fitted(data.specs[op], stepOf(op)), datasets: tablesOf(op)}, {
  mode: "vega-lite", actions: false, ast: true, renderer: "svg", bind: "#params",
  config: themed(data.themes[dark.matches ? "dark" : "light"])});

function filter() {
  const words = asked.text.value.toLowerCase().split(" ");
  for (const part of document.querySelectorAll("[data-op]")) {
    part.hidden = part.dataset.op !== asked.op.value;
    for (const table of part.hidden ? [] : part.querySelectorAll("table")) {
      const wanted = Array.from(table.rows[0].cells, (cell) => asked[cell.dataset.name]?.value);
      for (const row of table.querySelectorAll("tbody tr:not(.form)")) {
        const text = `${row.textContent} ${row.parentNode.dataset.form}`.toLowerCase();
        row.hidden = !(words.every((word) => text.includes(word)) && wanted.every(
          (value, i) => !value || row.cells[i].textContent.split(" ").includes(value)));
      }
    }
  }
}

function sort(head) {
  const sign = head.ariaSort === "ascending" ? -1 : 1, column = head.cellIndex;
  for (const each of head.parentNode.cells) each.ariaSort = "none";
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  for (const body of head.closest("table").tBodies) {
    const keyed = Array.from(body.querySelectorAll("tr:not(.form)"), (row) => [row.cells[column].textContent, row]);
    keyed.sort(([a], [b]) => (a === "-") - (b === "-") || sign * (a - b || a.localeCompare(b)));
    body.append(...keyed.map(([, row]) => row));
  }
}

let shown = Promise.resolve(); // pictures of ops are drawn one after the other
function show() {
  shown = shown.then((last) => {
    last?.finalize();
    document.getElementById("params").replaceChildren();
    return draw("#pictures", asked.op.value);
  });
}

function showAll() {
  draw("#held-pictures", "");
  show();
}

document.forms.asked.addEventListener("input", filter);
document.addEventListener("click", ({target}) => target.matches("thead button") && sort(target.parentNode));
asked.op.addEventListener("change", show);
dark.addEventListener("change", showAll);
filter();
showAll();
