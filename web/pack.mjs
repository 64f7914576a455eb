// `node pack.mjs SOURCES.zip FOLDER QUESTION`: what a browser then needn't do.
// planner.zip: the sources, compiled by the very Python that will run them. planner.memory: that Python's memory, once it
// has imported the planner and answered the question. rest.zip: what of planner.zip it hasn't imported.
import { readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { loadPyodide } from "pyodide";

const [sources, folder, question] = process.argv.slice(2);
const compiler = await loadPyodide();
compiler.FS.writeFile("/sources.zip", readFileSync(sources));
compiler.runPython(`
import zipfile
from pathlib import Path
from py_compile import PycInvalidationMode, compile

with zipfile.ZipFile("/sources.zip") as sources, zipfile.ZipFile("/out.zip", "w", zipfile.ZIP_DEFLATED) as out:
    for one in sources.infolist():
        name, content = one.filename, sources.read(one)
        if name.endswith(".py"):
            Path("/one.py").write_bytes(content)
            compile("/one.py", "/one.pyc", name, doraise=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
            name, content = f"{name}c", Path("/one.pyc").read_bytes()
        out.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
`);
const planner = compiler.FS.readFile("/out.zip");

const started = await loadPyodide({ _makeSnapshot: true });
started.unpackArchive(planner, "zip", { extractDir: "/planner" });
const imported = started.runPython(`
import gc, json, sys

sys.path.insert(0, "/planner")


def answered(question):
    from accel_fsdp.planner import browser

    list(browser.answer(question))
    return json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)])


imported = answered(${JSON.stringify(question)})
del answered
gc.collect()
imported
`);
writeFileSync(`${folder}/planner.memory`, gzipSync(started.makeMemorySnapshot(), { level: 9 }));

compiler.globals.set("imported", imported);
compiler.runPython(`
import json

known = {name.removeprefix("/planner/") for name in json.loads(imported)}
with zipfile.ZipFile("/out.zip") as planner, zipfile.ZipFile("/rest.zip", "w", zipfile.ZIP_DEFLATED) as rest:
    for one in planner.infolist():
        if one.filename not in known:
            rest.writestr(one, planner.read(one))
`);
writeFileSync(`${folder}/planner.zip`, planner);
writeFileSync(`${folder}/rest.zip`, compiler.FS.readFile("/rest.zip"));
