// Driver of openai-node: chats, typed output, tools, and their histories.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as paths from "./client_paths.mjs";

const Capital = z.object({ country: z.enum(["France", "Italy"]), capital: z.enum(["Paris", "Rome"]) });
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Return the current weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
      required: ["city"],
    },
  },
};

const connect = (server) => new OpenAI({ baseURL: server.url, apiKey: "any", maxRetries: 0, timeout: 120000 });
const user = (content) => ({ role: "user", content });
const knobs = (server, messages, rest) => ({ model: server.model, messages, max_tokens: 150, temperature: 0, ...rest });
const ask = (server, messages, rest = {}) => connect(server).chat.completions.create(knobs(server, messages, rest));

async function plain(server) {
  const answer = await ask(server, [user(paths.QUESTION)]);
  paths.check(answer.choices[0].message.content.includes("Paris"), answer);
  paths.check(answer.usage.completion_tokens > 0, answer);
}

async function streamed(server) {
  let text = "";
  let usage = null;
  for await (const chunk of await ask(server, [user(paths.QUESTION)], {
    stream: true,
    stream_options: { include_usage: true },
  })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  paths.check(text.includes("Paris") && usage?.completion_tokens > 0, { text, usage });
}

const parse = (server) =>
  connect(server).chat.completions.parse(
    knobs(server, [user(paths.QUESTION)], { response_format: zodResponseFormat(Capital, "capital") }),
  );

async function structured(server) {
  Capital.parse((await parse(server)).choices[0].message.parsed);
}

// Forced calls, whole, streamed and strict, their history, and the client's own loop of calls.
async function tools(server) {
  const history = [user(paths.WEATHER_QUESTION)];
  const forced = { tools: [WEATHER], tool_choice: "required" };
  const { message } = (await ask(server, history, forced)).choices[0];
  paths.check(message.tool_calls?.[0].function.name === "get_weather", message);
  const stream = connect(server).chat.completions.stream(knobs(server, history, forced));
  const whole = (await stream.finalChatCompletion()).choices[0].message;
  paths.check(
    JSON.stringify(whole.tool_calls.map((call) => call.function.arguments)) ===
      JSON.stringify(message.tool_calls.map((call) => call.function.arguments)),
    whole,
  );
  const strict = zodFunction({ name: "get_weather", parameters: z.object({ city: z.enum(["Paris", "Rome"]) }) });
  const parsed = await connect(server).chat.completions.parse(
    knobs(server, history, { tools: [strict], tool_choice: "required" }),
  );
  const turn = parsed.choices[0].message;
  paths.check(turn.tool_calls[0].function.parsed_arguments.city, turn);
  const results = (calls) => calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "18 degrees" }));
  for (const said of [message, whole, turn]) {
    await ask(server, [...history, said, ...results(said.tool_calls)], { tools: [WEATHER] });
  }
}

// A parsed message with every member that the client adds, asked on.
async function secondTurn(server) {
  const { message } = (await parse(server)).choices[0];
  const answer = await ask(server, [user(paths.QUESTION), message, user(paths.FOLLOW_UP)]);
  paths.check(answer.choices[0].message.content, answer);
}

const overflow = (server) => paths.expectOverflow(() => ask(server, [user(paths.LONG_PROMPT)]));

async function cancel(server) {
  const stream = await ask(server, [user(paths.STORY)], { stream: true, max_tokens: paths.ENDLESS_TOKENS });
  let seen = 0;
  for await (const _ of stream) if (++seen === 3) break;
  stream.controller.abort();
  await paths.expectIdle(server);
}

await paths.report({ plain, streamed, structured, tools, "second turn": secondTurn, overflow, cancel });
