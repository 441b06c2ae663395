// Runs pytest under Pyodide, a Python that needs nothing but node: no processes, no threads, no network.
//
//   node scripts/pyodide.mjs FOLDER ARGUMENTS...
//
// FOLDER holds `node_modules/pyodide` and `site` (unpacked wheels); scripts/versions makes both.
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

const [folder, ...options] = process.argv.slice(2);
const module = pathToFileURL(resolve(folder, "node_modules/pyodide/pyodide.mjs"));
const { loadPyodide } = await import(module);
try {
  const pyodide = await loadPyodide();
  pyodide.FS.mkdirTree("/project");
  pyodide.FS.mkdirTree("/site");
  pyodide.mountNodeFS("/project", process.cwd());
  pyodide.mountNodeFS("/site", resolve(folder, "site"));
  pyodide.globals.set("options", pyodide.toPy(options));
  process.exitCode = pyodide.runPython(`
import os, sys
os.chdir("/project")
sys.path[:0] = ["/project/src", "/project", "/site"]
sys.dont_write_bytecode = True
import pytest
int(pytest.main(["-p", "no:cacheprovider", *options]))
`);
} catch (problem) {
  console.error(problem.message); // the rest of it is Pyodide's own source
  process.exitCode = 1;
}
