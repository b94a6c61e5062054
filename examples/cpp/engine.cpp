// An engine with a toy model, which runs the same prompts several times with drafts of the service.
//
//   c++ -std=c++17 -O2 -o engine engine.cpp
//   ./engine /tmp/ssd-drafter.sock 8
//
// Arguments: path of the service's socket, how often to run the prompts, and if wanted the milliseconds that a step
// waits for its drafts, 20 by default.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "drafter.h"

constexpr uint32_t VOCAB_SIZE = 1000, MAX_DRAFT = 8;
constexpr size_t MAX_TOKENS = 200;

// The model: the next token is a function of the text.
uint32_t next_token(const ssd::Tokens& text) { return (31 * text.back() + 7 * uint32_t(text.size())) % VOCAB_SIZE; }

// Run the model once: return the tokens of the draft that it accepts, and its own next token.
ssd::Tokens verify(const ssd::Sequence& sequence) {
  ssd::Tokens text = sequence.prompt, tokens;
  text.insert(text.end(), sequence.output.begin(), sequence.output.end());
  for (size_t at = 0; at <= sequence.draft.size(); ++at) {
    tokens.push_back(next_token(text));
    text.push_back(tokens.back());
    if (at == sequence.draft.size() || tokens.back() != sequence.draft[at]) break;
  }
  return tokens;
}

// Run a batch of requests to their ends; return the number of steps.
size_t run(ssd::Drafter& drafter, const std::vector<ssd::Tokens>& prompts) {
  std::vector<ssd::Sequence> requests(prompts.size());
  std::vector<ssd::Sequence*> running;
  for (size_t i = 0; i < prompts.size(); ++i) {
    requests[i].prompt = prompts[i];
    running.push_back(&requests[i]);
  }
  size_t steps = 0;
  for (; !running.empty(); ++steps) {
    std::vector<uint32_t> limits;
    for (ssd::Sequence* each : running)  // A step adds one token to the accepted ones.
      limits.push_back(uint32_t(std::min<size_t>(MAX_DRAFT, MAX_TOKENS - each->output.size() - 1)));
    drafter.draft(running, limits);
    const auto began = ssd::Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // The duration of a step of a real model.
    size_t tokens = running.size();
    for (ssd::Sequence* each : running) {
      tokens += each->draft.size();
      each->commit(verify(*each), each->draft.size());
    }
    const std::chrono::duration<double> seconds = ssd::Clock::now() - began;
    drafter.record_step(uint32_t(tokens), uint32_t(running.size()), seconds.count());
    for (ssd::Sequence* each : running)
      if (each->output.size() >= MAX_TOKENS) drafter.finish(*each, true);
    running.erase(std::remove_if(running.begin(), running.end(),
                                 [](ssd::Sequence* each) { return each->output.size() >= MAX_TOKENS; }),
                  running.end());
  }
  return steps;
}

int main(int count, char** arguments) {
  if (count != 3 && count != 4) {
    std::fprintf(stderr, "usage: %s SOCKET TIMES [DEADLINE_MS]\n", arguments[0]);
    return 2;
  }
  const std::chrono::milliseconds deadline(count == 4 ? std::atoi(arguments[3]) : 20);
  ssd::Drafter drafter(arguments[1], "toy", "", VOCAB_SIZE, deadline);
  const std::vector<ssd::Tokens> prompts{{1, 2, 3}, {4, 5}};
  for (int time = 1; time <= std::atoi(arguments[2]); ++time)
    std::printf("run %d: %zu steps for %zu tokens\n", time, run(drafter, prompts), MAX_TOKENS);
}
