// The page: the form and its link, what the worker answers, what can be taken away.
const one = (query) => document.querySelector(query);
const form = one("form"), main = one("main"), status = one("#state p"), bar = one("progress");
const areas = ["#head", "#table", "#step", "#advice", "#figures"].map(one); // a section each; the last has all others
const error = one("#error"), take = one("#take"), texts = one("#texts");
const example = JSON.parse(one("#example").textContent);
const WAIT_MS = 150; // after a key; a choice is answered at once

const { build, bytes, plans } = document.body.dataset;

let ready = false, asked = 0, drawn = 0, computed = 0, since = 0, place = 0, timer, plan, note = "", strange = {}, waits = false;

const fields = [...form.querySelectorAll("[name]")];

function inputs() {
  const found = {};
  for (const field of fields) {
    const value = field.type === "checkbox" ? (field.checked ? "true" : "") : field.value.trim();
    if (field.name === "count") continue;
    if (field.name === "gpus") found.gpus = form.elements.count.value.trim() + "x" + value;
    else if (value !== field.dataset.default) found[field.name] = value;
  }
  return { ...found, ...strange };
}

function fill(given) {
  const values = { ...given }, shape = /^(?:(\d+)\s*x\s*)?(\d+)\s*x\s*(.+)$/i.exec(values.gpus ?? "");
  if (shape) {
    if (shape[1] > 1 && !values.nodes) values.nodes = shape[1];
    values.count = shape[1] && +shape[1] !== +(values.nodes || 1) ? undefined : shape[2];
    values.gpus = values.count ? shape[3] : values.gpus;
  }
  strange = Object.fromEntries(Object.entries(given).filter(([name]) => !(name in form.elements)));
  if (values.gpus && !values.count) strange.gpus = values.gpus; // Python says what is wrong with it
  for (const field of fields) {
    const value = values[field.name] ?? field.dataset.default;
    if (field.type === "checkbox") field.checked = value === "true";
    else if (field.localName === "select") choose(field, value);
    else if (field.type !== "number" || /^(\d+(\.\d+)?)?$/.test(value)) field.value = value;
    else {
      field.value = "";
      strange[field.name] = value;
    }
  }
  count();
}

// An option of a link that the page doesn't offer is added, so that the answer is about what was asked.
function choose(field, value) {
  const last = value.toLowerCase().split("/").pop();
  const options = [...field.options];
  const plain = (option) => option.value.toLowerCase();
  const found =
    options.find((option) => option.value === value) ??
    options.find((option) => plain(option) === value.toLowerCase()) ??
    options.find((option) => field.name === "model" && !value.includes("/") && plain(option).split("/").pop() === last) ??
    options.find((option) => field.name === "gpus" && plain(option).startsWith(last + "-"));
  if (found) field.value = found.value;
  else {
    field.add(new Option(value, value));
    field.value = value;
  }
}

function link(given) {
  return "#" + new URLSearchParams(given).toString().replaceAll("%2F", "/");
}

function count() {
  const hidden = fields.filter((field) => field.closest("#more") || getComputedStyle(field).visibility === "hidden");
  const changed = hidden.filter((field) =>
    field.type === "checkbox" ? field.checked : field.value !== field.dataset.default,
  ).length;
  one("#changed").textContent = changed ? `(${changed} changed)` : "";
}

function ask() {
  clearTimeout(timer);
  count();
  const given = inputs();
  history.replaceState(null, "", link(given));
  asked += 1;
  since = performance.now();
  waits = true;
  main.ariaBusy = "true";
  worker.postMessage({ id: asked, inputs: JSON.stringify(given) });
  if (ready) say("Planning");
  else foretell(asked, given);
}

// While Python loads, the answer comes from a table that was made with the page, where the table has it.
async function foretell(id, { model, gpus, ...others }) {
  const others_are_usual = !Object.keys(others).length;
  const sections = others_are_usual ? await tabled(model, gpus).catch(() => null) : null;
  if (id !== asked || drawn === id || ready) return;
  note = sections ? "From a table made with this page; computed anew in a moment. " : "Not in the page's table: computed here. ";
  say(note + "Loading Python");
  if (!sections) return;
  begin(id);
  sections.forEach(draw);
  areas.slice(sections.length).forEach((area) => area.replaceChildren());
  take.hidden = texts.hidden = true;
  main.dataset.tabled = id;
  main.ariaBusy = "false";
}

async function tabled(model, gpus) {
  const found = await fetch(`${plans}/${model.replaceAll("/", "--")}.plans`);
  if (!found.ok) return null;
  const text = await new Response(found.body.pipeThrough(new DecompressionStream("gzip"))).text();
  return JSON.parse(text)[gpus];
}

function begin(id) {
  drawn = id;
  place = 0;
  error.hidden = true;
}

function say(text) {
  if (status.textContent !== text) status.textContent = text;
}

function show(message) {
  if (message.error) {
    const { what, why, fix } = message.error;
    error.querySelector("h1").textContent = what;
    [...error.querySelectorAll("dd")].forEach((cell, number) => (cell.textContent = [why, fix][number]));
    error.hidden = false;
    areas.forEach((area) => area.replaceChildren());
    place = areas.length;
    take.hidden = texts.hidden = true;
    document.title = "accel-fsdp: " + what;
    say("");
    main.ariaBusy = "false";
  } else if (message.plan) {
    plan = message.plan;
    offer();
  } else draw(message.section);
}

// Each section takes the place of the one before it, so that nothing jumps while one reads.
function draw(html) {
  const last = areas.length - 1;
  const area = areas[Math.min(place, last)], number = Math.max(place - last, 0);
  const box = area.children[number] ?? area.appendChild(document.createElement("div"));
  box.innerHTML = html;
  place += 1;
}

// What an answer before this one had and this one hasn't.
function trim() {
  [...areas.at(-1).children].slice(place - areas.length + 1).forEach((box) => box.remove());
}

function finish() {
  main.dataset.answered = asked;
  waits = false;
  note = "";
  if (error.hidden) trim();
  main.ariaBusy = "false";
  if (error.hidden) say(`Planned in ${((performance.now() - since) / 1000).toFixed(1)} s, in this tab`);
}

function offer() {
  document.title = plan.title + ": accel-fsdp";
  one("#yaml").textContent = plan.yaml;
  one("#command").textContent = plan.command;
  const [yaml, json] = take.querySelectorAll("a");
  file(yaml, plan.yaml, "application/yaml");
  file(json, plan.json, "application/json");
  yaml.hidden = texts.querySelector("details").hidden = !plan.yaml;
  take.hidden = texts.hidden = false;
}

function file(anchor, text, type) {
  URL.revokeObjectURL(anchor.href);
  anchor.href = URL.createObjectURL(new Blob([text], { type }));
}

async function copy(button) {
  const text = button.dataset.copy === "link" ? location.href : plan.command;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea"); // a frame may have no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const name = (button.dataset.name ??= button.textContent); // pressed again it says Copied already
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = name), 1200);
}

function failed(what) {
  bar.hidden = true;
  const why = "the planner is Python, which the browser has to load from this page's own folder";
  const fix = "reload the page; else try a recent Chrome, Edge, Firefox or Safari, or accel-fsdp plan in a terminal";
  show({ error: { what, why, fix } });
}

// A worker made from a blob keeps this page's policy, so that the browser itself lets it reach no other host.
function start() {
  const program = new URL(`worker.js?${build}`, document.baseURI).href;
  const code = `import ${JSON.stringify(program)};`;
  const made = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })), { type: "module" });
  made.onerror = () => failed("Python can't be started here");
  made.onmessage = ({ data }) => {
    if (data.loaded !== undefined) {
      bar.value = data.loaded / Number(bytes);
      say(`${note}Loading Python: ${(data.loaded / 1e6).toFixed(1)} MB`);
    } else if (data.step) say(note + data.step);
    else if (data.failed) failed(data.failed);
    else if (data.ready) {
      ready = true;
      bar.hidden = true;
      say(waits ? "Planning" : "Ready");
    } else if (data.id === asked) {
      if (computed !== data.id) begin((computed = data.id));
      data.done ? finish() : show(JSON.parse(data.message));
    }
  };
  made.postMessage({ site: document.baseURI, build });
  return made;
}

function open() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  fill(Object.keys(given).length ? given : example.inputs);
  if (Object.keys(given).length) return ask();
  clearTimeout(timer);
  waits = false;
  begin((asked += 1)); // so that an answer under way is for another question
  plan = example.plan;
  [...one("template").content.children].forEach((section) => draw(section.outerHTML));
  trim();
  offer();
  main.ariaBusy = "false";
  if (ready) say("Ready");
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", ({ target }) => {
  delete strange[target.name];
  if (target.name === "gpus" || target.name === "count") delete strange.gpus;
  clearTimeout(timer);
  timer = setTimeout(ask, target.type === "number" ? WAIT_MS : 0);
});
take.addEventListener("click", ({ target }) => target.dataset.copy && copy(target));
addEventListener("hashchange", () => location.hash !== link(inputs()) && open());

bar.hidden = false;
say("Loading Python");
const worker = start();
open();
