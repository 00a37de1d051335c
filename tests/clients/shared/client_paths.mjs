// Paths that each client on Node is led along, and the report of them: client_paths.py in JavaScript.

export const QUESTION = "What is the capital of France?";
export const FOLLOW_UP = "And of Italy?";
export const WEATHER_QUESTION = "What is the weather in Paris?";
export const STORY = "Write a very long story about a lighthouse keeper, with many chapters.";
export const LONG_PROMPT = "word ".repeat(12000);
export const ENDLESS_TOKENS = 4000;
const IDLE_TIMEOUT_MS = 20000;
const REMARK_LENGTH = 300;

class AssertionError extends Error {}

export function check(condition, remark) {
  if (!condition) throw new AssertionError(JSON.stringify(remark));
}

function* causes(error) {
  for (let one = error; one; one = one.cause ?? one.lastError ?? one.error) yield one;
}

function status(error) {
  for (const one of causes(error)) {
    const found = one.status ?? one.statusCode;
    if (typeof found === "number") return found;
  }
  return 0;
}

// Checks that the call is refused because its prompt is beyond the context.
export async function expectOverflow(call) {
  try {
    await call();
  } catch (error) {
    const told = [...causes(error)].map((one) => `${one.code} ${one.message} ${one.responseBody ?? ""}`).join(" ");
    check(/context_length_exceeded|maximum context length/.test(told), `not known as an overflow: ${told}`);
    return error.constructor.name;
  }
  throw new AssertionError("a prompt beyond the context was answered");
}

// Checks that the gateway has no request any more soon after a cancel.
export async function expectIdle(server) {
  const deadline = Date.now() + IDLE_TIMEOUT_MS;
  for (;;) {
    const metrics = await (await fetch(`${server.root}/metrics`)).text();
    const lines = metrics.split("\n").filter((line) => /^vllm:num_requests_(running|waiting)/.test(line));
    if (!lines.some((line) => Number(line.split(" ").at(-1)))) return;
    check(Date.now() < deadline, "a request still runs after the cancel");
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
}

// Runs the paths one after another and prints a JSON line for each; "tools" runs with both models. No driver
// here asks about images.
export async function report(paths) {
  const model = process.env.CLIENT_MODEL;
  const server = (root) => ({ root, url: `${root}/v1`, model });
  for (const [name, path] of Object.entries(paths)) {
    await run(name, path, server(process.env.CLIENT_ROOT));
    if (name === "tools") await run("tools (template)", path, server(process.env.CLIENT_TOOLS_ROOT));
  }
  console.log(JSON.stringify({ path: "images", result: "not offered", remark: "its images are not driven" }));
  process.exit(0);
}

async function run(name, path, server) {
  let result = "ok";
  let remark = "";
  try {
    remark = (await path(server)) ?? "";
  } catch (error) {
    console.error(error);
    const code = status(error);
    result = code >= 400 && code < 500 ? "refused" : "failed";
    remark = `${error.constructor.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ path: name, result, remark: remark.slice(0, REMARK_LENGTH) }));
}
