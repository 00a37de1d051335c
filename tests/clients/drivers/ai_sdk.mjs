// Driver of Vercel's AI SDK with its provider for OpenAI-compatible servers.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as paths from "./client_paths.mjs";

const Capital = z.object({ country: z.enum(["France", "Italy"]), capital: z.enum(["Paris", "Rome"]) });
const weather = tool({
  description: "Return the current weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `18 degrees and sun in ${city}`,
});

function knobs(server, rest) {
  const provider = createOpenAICompatible({
    name: "diptych",
    baseURL: server.url,
    apiKey: "any",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  return { model: provider(server.model), maxRetries: 0, maxOutputTokens: 150, temperature: 0, ...rest };
}

async function readStream(options) {
  let failure;
  const result = streamText({ ...options, onError: ({ error }) => (failure = error) });
  let pieces = 0;
  let text = "";
  for await (const piece of result.textStream) {
    pieces += 1;
    text += piece;
  }
  if (failure) throw failure;
  return { pieces, text, result };
}

async function plain(server) {
  const answer = await generateText(knobs(server, { system: "You are helpful.", prompt: paths.QUESTION }));
  paths.check(answer.text.includes("Paris") && answer.usage.outputTokens > 0, answer.text);
}

async function streamed(server) {
  const { pieces, text, result } = await readStream(knobs(server, { prompt: paths.QUESTION }));
  paths.check(text.includes("Paris") && pieces > 1 && (await result.usage).outputTokens > 0, text);
}

async function structured(server) {
  const output = Output.object({ schema: Capital });
  Capital.parse((await generateText(knobs(server, { prompt: paths.QUESTION, output }))).output);
  const { result } = await readStream(knobs(server, { prompt: paths.QUESTION, output }));
  Capital.parse(await result.output);
}

// A forced call, its result in the next step with the choice left to the model, and a turn after both.
async function tools(server) {
  const options = {
    prompt: paths.WEATHER_QUESTION,
    tools: { get_weather: weather },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
  };
  const answer = await generateText(knobs(server, options));
  paths.check(answer.steps[0].toolCalls[0]?.toolName === "get_weather", answer.steps[0].content);
  const { result } = await readStream(knobs(server, options));
  paths.check((await result.steps)[0].toolCalls.length > 0, "no call was streamed");
  const messages = [
    { role: "user", content: paths.WEATHER_QUESTION },
    ...answer.response.messages,
    { role: "user", content: paths.FOLLOW_UP },
  ];
  await generateText(knobs(server, { messages, tools: { get_weather: weather }, toolChoice: "none" }));
}

async function secondTurn(server) {
  const question = { role: "user", content: paths.QUESTION };
  const first = await generateText(knobs(server, { messages: [question] }));
  const messages = [question, ...first.response.messages, { role: "user", content: paths.FOLLOW_UP }];
  paths.check((await generateText(knobs(server, { messages }))).text, messages);
}

const overflow = (server) => paths.expectOverflow(() => generateText(knobs(server, { prompt: paths.LONG_PROMPT })));

async function cancel(server) {
  const controller = new AbortController();
  const options = { prompt: paths.STORY, maxOutputTokens: paths.ENDLESS_TOKENS, abortSignal: controller.signal };
  const result = streamText({ ...knobs(server, options), onError: () => {} });
  let seen = 0;
  for await (const _ of result.textStream) if (++seen === 3) controller.abort();
  await paths.expectIdle(server);
}

await paths.report({ plain, streamed, structured, tools, "second turn": secondTurn, overflow, cancel });
