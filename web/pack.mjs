// Compiles Python with the very Python that will run it: `node pack.mjs SOURCES.zip OUT.zip`. A browser then needn't.
import { readFileSync, writeFileSync } from "node:fs";
import { loadPyodide } from "pyodide";

const [sources, out] = process.argv.slice(2);
const python = await loadPyodide();
python.FS.writeFile("/sources.zip", readFileSync(sources));
python.runPython(`
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
writeFileSync(out, python.FS.readFile("/out.zip"));
