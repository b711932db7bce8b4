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
    loading ??= load(data, (loaded) => self.postMessage({ loaded }));
    const reply = await loading;
    self.postMessage({ id, isReady: true });
    self.postMessage({ id, answer: reply(request) });
  } catch (error) {
    loading = null;
    self.postMessage({ id, failed: error.message });
  }
};

async function load({ pyodide, files }, onProgress) {
  const count = countingFetch(onProgress);
  const [{ loadPyodide }, bundle] = await Promise.all([import(`${pyodide}pyodide.mjs`), fetch(files)]);
  if (!bundle.ok) throw new Error(`${files}: ${bundle.status}`);
  const [python, texts] = await Promise.all([count(() => loadPyodide({ indexURL: pyodide })), bundle.json()]);
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

// Return a function that calls another one, and counts the bytes that are fetched meanwhile.
function countingFetch(onProgress) {
  return async (call) => {
    const original = self.fetch;
    let loaded = 0;
    self.fetch = async (...asked) => {
      const response = await original(...asked);
      if (!response.ok || !response.body) return response;
      const counter = new TransformStream({
        transform(chunk, controller) {
          onProgress((loaded += chunk.byteLength));
          controller.enqueue(chunk);
        },
      });
      const { status, statusText, headers } = response;
      return new Response(response.body.pipeThrough(counter), { status, statusText, headers });
    };
    try {
      return await call();
    } finally {
      self.fetch = original;
    }
  };
}
