// Runs the planner, which is Python, beside the page, so that the page stays responsive.
let latest, loaded = 0;

// Counts the bytes of each file on their way, also of those that Pyodide asks for.
const request = self.fetch;
self.fetch = async (...arguments_) => {
  const response = await request(...arguments_);
  if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
  const count = (chunk, stream) => {
    postMessage({ loaded: (loaded += chunk.length) });
    stream.enqueue(chunk);
  };
  const body = response.body.pipeThrough(new TransformStream({ transform: count }));
  return new Response(body, { headers: response.headers });
};

async function start() {
  const { href, search } = new URL(import.meta.url);
  const [{ loadPyodide }, planner] = await Promise.all([
    import("./pyodide/pyodide.mjs"),
    fetch(new URL("planner.zip" + search, href)).then((response) => response.arrayBuffer()),
  ]);
  const python = await loadPyodide({ stdout: () => {}, stderr: () => {} });
  postMessage({ step: "Starting the planner" });
  python.unpackArchive(planner, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.dont_write_bytecode = True; sys.path.insert(0, '/planner')");
  return python.pyimport("accel_fsdp.planner").browser;
}

const started = start();
started.catch(() => {}); // each question reports it

self.onmessage = async ({ data: { id, inputs } }) => {
  latest = id;
  try {
    const browser = await started;
    await new Promise((go) => setTimeout(go)); // a newer question may have come
    if (latest === id) postMessage({ id, answer: browser.answer(inputs) });
  } catch (error) {
    postMessage({ failed: `The planner stopped: ${String(error?.message ?? error).trim().split("\n").pop()}` });
  }
};
