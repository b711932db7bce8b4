// Asks the server of `nanovllm view`, which runs the scheduler again (`what_if/server.py`).

export async function askServer(request, run, { signal }) {
  const body = JSON.stringify({ recording: run.name, ...request });
  const response = await fetch("ask", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
  if (response.ok) return response.json();
  return { error: `${response.status} ${await response.text()}` };
}
