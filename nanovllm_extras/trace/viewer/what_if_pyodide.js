// Asks a worker, in which Pyodide runs the scheduler: a page of the site needs no server. The worker begins with the
// first question (`nanovllm_extras/what_if/browser/worker.js`).

const PYODIDE_BYTES = 12.3e6; // of the interpreter and its library, unpacked; only the progress shown depends on it

export class PyodideClient {
  // about: {worker, pyodide, files}, the addresses of the worker, of Pyodide's folder and of the Python files
  constructor(about) {
    this.about = about;
    this.worker = null;
    this.pending = new Map(); // id -> {resolve, t, progress}
    this.newest = 0;
    this.ask = (request, run, context) => this.send({ recording: run.recording, ...request }, context);
  }

  // Return a promise of {recording: text of the run of these requests} or {error}.
  record(requests, context) {
    return this.send({ requests }, context);
  }

  send(request, { t, progress }) {
    return new Promise((resolve) => {
      if (location.protocol === "file:") return resolve({ error: t("whatIfFile") });
      const id = ++this.newest;
      this.pending.set(id, { resolve, t, progress });
      this.worker ??= this.start();
      const { pyodide, files } = this.about;
      return this.worker.postMessage({ id, pyodide: new URL(pyodide, location.href).href, files: new URL(files, location.href).href, request: JSON.stringify(request) });
    });
  }

  start() {
    const worker = new Worker(this.about.worker, { type: "module" });
    worker.onmessage = ({ data }) => this.take(data);
    worker.onerror = (event) => this.stop((t) => t("whatIfCannotLoad", { reason: event.message ?? this.about.worker }));
    return worker;
  }

  take({ id, loaded, isReady, failed, answer }) {
    if (loaded !== undefined) {
      const share = Math.min(99, Math.floor((100 * loaded) / PYODIDE_BYTES));
      for (const one of this.pending.values()) one.progress(one.t("whatIfLoads", { share, size: (PYODIDE_BYTES / 1e6).toFixed(0) }));
      return;
    }
    const one = this.pending.get(id);
    if (!one) return;
    if (isReady) return one.progress(one.t("whatIfRuns"));
    if (failed !== undefined) return this.stop((t) => t("whatIfCannotLoad", { reason: failed })); // another worker can try again
    this.pending.delete(id);
    one.resolve(JSON.parse(answer));
  }

  // End the worker and what it computes. The next question begins another one.
  stop(why = (t) => t("whatIfStopped")) {
    this.worker?.terminate();
    this.worker = null;
    for (const { resolve, t } of this.pending.values()) resolve({ error: why(t) });
    this.pending.clear();
  }
}
