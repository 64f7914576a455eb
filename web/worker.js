// Runs the planner, which is Python, beside the page, so that the page stays responsive.
let latest = 0, waiting = null, browser = null, busy = false, loaded = 0, broken = "";

// Reports each file that has come. A stream through here would keep browsers from caching the compiled Python.
new PerformanceObserver((list) => {
  for (const file of list.getEntries()) loaded += file.decodedBodySize;
  if (!browser) postMessage({ loaded });
}).observe({ type: "resource", buffered: true });

async function start(planner) {
  const archive = fetch(planner).then((found) => {
    if (!found.ok) throw new Error(`${planner}: ${found.status}`);
    return found.arrayBuffer();
  });
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const quiet = () => {};
  const python = await loadPyodide({ stdout: quiet, stderr: quiet });
  postMessage({ step: "Starting the planner" });
  python.unpackArchive(await archive, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  browser = python.pyimport("accel_fsdp.planner").browser;
  postMessage({ ready: true });
  await work();
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
  if (data.planner) return start(data.planner).catch(fails);
  if (broken) return postMessage({ failed: broken });
  latest = data.id;
  waiting = data;
  work().catch(fails);
};
