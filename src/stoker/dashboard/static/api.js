// Requests to the API; a page that was written with --html has the answers in it.

const embeddedNode = document.getElementById("embedded");
const embedded = embeddedNode ? JSON.parse(embeddedNode.textContent) : null;

export const isStatic = embedded !== null;
export const embeddedRun = embedded ? embedded["/api/runs"].runs[0].id : null;
export const traffic = { bytes: 0, requests: 0 };

async function request(path, options) {
  const response = await fetch(path, options);
  const text = await response.text();
  traffic.bytes += text.length;
  traffic.requests += 1;
  const answer = JSON.parse(text);
  if (!response.ok) throw new Error(answer.error || `HTTP ${response.status}`);
  return answer;
}

export function post(path) {
  return request(path, { method: "POST" });
}

export async function get(path, query = {}, signal = undefined) {
  if (embedded) {
    const choice = ["metric", "sample"].find((name) => query[name] !== undefined);
    const answer = embedded[choice ? `${path}?${choice}=${query[choice]}` : path];
    if (!answer) throw new Error("not part of this page");
    return answer;
  }
  const words = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(words).toString();
  return request(search ? `${path}?${search}` : path, { signal });
}

export function runPath(id, rest = "") {
  return `/api/runs/${encodeURIComponent(id)}${rest}`;
}

export function listen(id, onUpdate, onState) {
  if (embedded) return () => {};
  const source = new EventSource(runPath(id, "/stream"));
  source.addEventListener("open", () => onState(true));
  source.addEventListener("error", () => onState(false));
  source.addEventListener("update", (message) => { onState(true); onUpdate(JSON.parse(message.data)); });
  return () => source.close();
}
