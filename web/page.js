// The page: the form and its link, what the worker answers, what can be taken away.
const one = (query) => document.querySelector(query);
const form = one("form"), main = one("main"), status = one("#state p"), bar = one("progress"), take = one("#take");
const fields = [...form.querySelectorAll("[name]")];
const { build, bytes, example } = document.body.dataset; // bytes: of all that the worker fetches
const WAIT_MS = 150; // after a key; a choice is answered at once

let asked = 0, since = 0, timer, plan, ready = false, others = {}; // others: parameters of a link without a field

const valueOf = (field) => (field.type === "checkbox" ? (field.checked ? "true" : "") : field.value.trim());
const isChanged = (field) => valueOf(field) !== field.dataset.default;
const link = (inputs) => "#" + new URLSearchParams(inputs).toString().replaceAll("%2F", "/");

function inputs() {
  const given = Object.fromEntries(fields.filter(isChanged).map((field) => [field.name, valueOf(field)]));
  if (given.count) given.gpus = `${given.count}x${given.gpus}`;
  delete given.count;
  return { ...given, ...others };
}

function fill(given) {
  const [, count = "", gpus = given.gpus] = /^(\d+)\s*x\s*(.+)$/i.exec(given.gpus ?? "") ?? [];
  const values = { ...given, count, gpus };
  for (const field of fields) {
    const value = values[field.name] ?? field.dataset.default;
    if (field.type === "checkbox") field.checked = value === "true";
    else {
      if (field.options && ![...field.options].some((option) => option.value === value)) field.add(new Option(value, value));
      field.value = value;
    }
  }
  others = Object.fromEntries(Object.entries(given).filter(([name]) => !(name in form.elements)));
  one("#more").open ||= fields.some((field) => field.closest("#more") && isChanged(field));
}

function ask() {
  clearTimeout(timer);
  const given = inputs();
  history.replaceState(null, "", link(given));
  asked += 1;
  since = performance.now();
  main.ariaBusy = "true";
  if (ready) say("Planning");
  worker.postMessage({ id: asked, inputs: JSON.stringify(given) });
}

function open() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  fill(Object.keys(given).length ? given : JSON.parse(example));
  ask();
}

function say(text) {
  if (status.textContent !== text) status.textContent = text;
}

function show(answer) {
  plan = answer;
  document.title = `${plan.title}: accel-fsdp`;
  main.innerHTML = plan.html; // made by this page's own Python, which escapes
  main.ariaBusy = "false";
  main.dataset.answered = asked;
  take.hidden = !plan.json;
  offer("fsdp.yaml", plan.yaml);
  offer("plan.json", plan.json);
  say(plan.json ? `Planned in ${((performance.now() - since) / 1000).toFixed(1)} s, in this tab` : "");
}

function offer(name, text = "") {
  const anchor = one(`[download="${name}"]`);
  anchor.hidden = !text;
  anchor.href = "data:text/plain;charset=utf-8," + encodeURIComponent(text);
}

function failed(what) {
  bar.hidden = true;
  main.ariaBusy = "false";
  main.textContent = `${what}. Reload the page; else try a recent browser, or accel-fsdp plan in a terminal.`;
  say("The planner is Python, which the browser has to load from this page's own folder.");
}

// A worker made from a blob keeps this page's policy, so that the browser itself lets it reach no other host.
function start() {
  const program = new URL(`worker.js?${build}`, document.baseURI).href;
  const code = new Blob([`import ${JSON.stringify(program)};`], { type: "text/javascript" });
  const made = new Worker(URL.createObjectURL(code), { type: "module" });
  made.onerror = () => failed("Python can't be started here");
  made.onmessage = ({ data: { loaded, step, failed: what, id, answer } }) => {
    if (loaded) {
      bar.value = loaded / bytes;
      const megabytes = [loaded, bytes].map((size) => (size / 1e6).toFixed(1));
      say(loaded < bytes ? `Loading Python: ${megabytes.join(" of ")} MB` : "Starting Python");
    } else if (step) say(step);
    else if (what) failed(what);
    else {
      ready = bar.hidden = true;
      if (id === asked) show(JSON.parse(answer));
    }
  };
  return made;
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", ({ target }) => {
  delete others[target.name];
  clearTimeout(timer);
  timer = setTimeout(ask, target.inputMode ? WAIT_MS : 0);
});
take.addEventListener("click", async ({ target: { dataset } }) => {
  if (!dataset.copy) return;
  await navigator.clipboard.writeText(dataset.copy === "link" ? location.href : plan.command);
  say("Copied");
});
addEventListener("hashchange", () => location.hash !== link(inputs()) && open());

const worker = start();
open();
