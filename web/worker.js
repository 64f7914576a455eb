// Runs the planner, which is Python, beside the page, so that the page stays responsive.
let latest = 0, waiting = null, browser = null, busy = false, loaded = 0, broken = "";

// Reports each file that has come. A stream through here would keep browsers from caching the compiled Python.
new PerformanceObserver((list) => {
  for (const file of list.getEntries()) loaded += file.decodedBodySize;
  if (!browser) postMessage({ loaded });
}).observe({ type: "resource", buffered: true });

async function fetched(address) {
  const found = await fetch(address);
  if (!found.ok) throw new Error(`${address}: ${found.status}`);
  return found;
}

async function start(site, build) {
  const at = (name) => new URL(`${name}?${build}`, site).href;
  const python = await restored(at).catch(() => begun(at));
  browser = python.pyimport("accel_fsdp.planner").browser;
  postMessage({ ready: true });
  await work();
}

const quiet = { stdout: () => {}, stderr: () => {} };
const place = { extractDir: "/planner" };

// Python goes on where the one that made this page stood: it had imported the planner and answered.
async function restored(at) {
  const rest = fetched(at("rest.zip")).then((found) => found.arrayBuffer());
  const [{ loadPyodide }, { default: create }, memory] = await Promise.all([
    import("./pyodide/pyodide.mjs"),
    import("./pyodide/pyodide.asm.mjs"),
    fetched(at("planner.memory")),
  ]);
  const unpacked = memory.body.pipeThrough(new DecompressionStream("gzip"));
  const _loadSnapshot = new Uint8Array(await new Response(unpacked).arrayBuffer());
  const createPyodideModule = async (settings) => {
    const made = await create(settings);
    made._malloc(_loadSnapshot.length); // makes room, which Pyodide takes for granted
    return made;
  };
  const python = await loadPyodide({ ...quiet, _loadSnapshot, createPyodideModule });
  postMessage({ step: "Starting the planner" });
  python.unpackArchive(await rest, "zip", place);
  return python;
}

// Python starts anew, which takes some seconds more: for browsers in which it can't go on.
async function begun(at) {
  const [{ loadPyodide }, planner] = await Promise.all([import("./pyodide/pyodide.mjs"), fetched(at("planner.zip"))]);
  const python = await loadPyodide(quiet);
  postMessage({ step: "Starting the planner" });
  python.unpackArchive(await planner.arrayBuffer(), "zip", place);
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python;
}

// The newest question is answered; an older one is left as soon as a newer has come.
async function work() {
  if (busy || !browser) return;
  busy = true;
  while (waiting) {
    const { id, inputs } = waiting;
    waiting = null;
    const answer = browser.answer(inputs);
    for (const message of answer) {
      postMessage({ id, message });
      await new Promise((go) => setTimeout(go));
      if (latest !== id) break;
    }
    answer.destroy();
    if (latest === id) postMessage({ id, done: true });
  }
  busy = false;
}

const fails = (error) => {
  busy = false;
  broken = `The planner stopped: ${String(error?.message ?? error).trim().split("\n").pop()}`;
  postMessage({ failed: broken });
};

self.onmessage = ({ data }) => {
  if (data.site) return start(data.site, data.build).catch(fails);
  if (broken) return postMessage({ failed: broken });
  latest = data.id;
  waiting = data;
  work().catch(fails);
};
