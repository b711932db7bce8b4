// The worker of the page: it loads Pyodide and the Python files once, and calls `reply` of answer.py for each request.
//
//   gets   {id, pyodide, files, request}     addresses of Pyodide's folder and of the files; the request as JSON
//   sends  {loaded}                          while Pyodide is loaded: bytes of it so far
//          {id, isReady: true}               it is loaded, and the simulation begins
//          {id, answer} or {id, failed}      the answer as JSON, or why Pyodide cannot be loaded

let loading = null; // a promise of `reply`; the first request begins it

self.onmessage = async ({ data }) => {
  const { id, request } = data;
  try {
    loading ??= load(data);
    const reply = await loading;
    self.postMessage({ id, isReady: true });
    self.postMessage({ id, answer: reply(request) });
  } catch (error) {
    self.postMessage({ id, failed: error.message });
  }
};

async function load({ pyodide, files }) {
  const [{ loadPyodide }, bundle] = await Promise.all([import(`${pyodide}pyodide.mjs`), fetch(files)]);
  if (!bundle.ok) throw new Error(`${files}: ${bundle.status}`);
  const [python, texts] = await Promise.all([watchFetches(() => loadPyodide({ indexURL: pyodide })), bundle.json()]);
  for (const [path, text] of Object.entries(texts)) {
    python.FS.mkdirTree(`/files/${path}`.replace(/\/[^/]*$/, ""));
    python.FS.writeFile(`/files/${path}`, text);
  }
  python.runPython(`
import sys, types
sys.path.insert(0, "/files")
for name in ("nanovllm", "nanovllm_extras"):  # their own __init__ would import torch
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [f"/files/{name}"]
`);
  return python.pyimport("nanovllm_extras.what_if.browser.answer").reply;
}

// Return the promise of `call()`, and post how many bytes it has fetched. A file that cannot be fetched, or that ends too
// early, rejects the promise: Pyodide itself would wait for its wasm file for ever.
function watchFetches(call) {
  const original = self.fetch;
  let loaded = 0;
  const watched = new Promise((resolve, reject) => {
    self.fetch = async (address, ...others) => {
      const fail = (reason) => {
        reject(new Error(`${address}: ${reason}`));
        return new Error(reason);
      };
      const response = await original(address, ...others).catch((error) => { throw fail(error.message); });
      if (!response.ok) throw fail(response.status);
      const reader = response.body.getReader();
      const body = new ReadableStream({
        async pull(controller) {
          const { done, value } = await reader.read().catch((error) => { throw fail(error.message); });
          if (done) return controller.close();
          self.postMessage({ loaded: (loaded += value.byteLength) });
          return controller.enqueue(value);
        },
      });
      const { status, statusText, headers } = response;
      return new Response(body, { status, statusText, headers });
    };
    call().then(resolve, reject);
  });
  return watched.finally(() => { self.fetch = original; });
}
