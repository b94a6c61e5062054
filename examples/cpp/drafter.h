// A client of the drafter service for engines in C++17, over the step socket of a service on the same machine.
//
// It needs no library: the few messages of the protocol (protos/ssd/drafter/v1/drafter.proto) are written and read here.
// One thread may use it. Arrays are copied as they are in memory, so the machine must be little-endian.
//
// Failures cost drafts and throw no exception. A step waits for drafts until the deadline; a step that connects waits up to
// a second, and one whose request the service does not read up to 0.1 s.

#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace ssd {

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<uint32_t>;

// Protocol Buffers, as far as they are needed.

class Writer {
 public:
  std::string data;

  void number(int field, uint64_t value) {
    varint(uint64_t(field) << 3);
    varint(value);
  }
  void bytes(int field, const void* begin, size_t size) {
    varint(uint64_t(field) << 3 | 2);
    varint(size);
    data.append(static_cast<const char*>(begin), size);
  }
  void bytes(int field, const std::string& value) { bytes(field, value.data(), value.size()); }
  template <typename T>
  void array(int field, const std::vector<T>& values) {
    bytes(field, values.data(), values.size() * sizeof(T));
  }

 private:
  void varint(uint64_t value) {
    for (; value > 127; value >>= 7) data.push_back(char(value | 128));
    data.push_back(char(value));
  }
};

// Reads the fields of a message one after another. Fields that the caller does not know are skipped.
class Reader {
 public:
  int field = 0;
  uint64_t number = 0;    // Value of a number.
  std::string bytes;      // Value of bytes, a string or a message.
  bool is_valid = true;

  explicit Reader(std::string data) : data_(std::move(data)) {}

  bool next() {
    if (at_ >= data_.size()) return false;
    uint64_t key = varint();
    field = int(key >> 3);
    switch (key & 7) {
      case 0: number = varint(); return is_valid;
      case 1: return take(8);
      case 2: return take(varint());
      case 5: return take(4);
      default: return is_valid = false;
    }
  }
  template <typename T>
  std::vector<T> array() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  std::string data_;
  size_t at_ = 0;

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; at_ < data_.size() && shift < 64; shift += 7) {
      uint8_t byte = uint8_t(data_[at_++]);
      value |= uint64_t(byte & 127) << shift;
      if (byte < 128) return value;
    }
    is_valid = false;
    return 0;
  }
  bool take(uint64_t size) {
    if (!is_valid || size > data_.size() - at_) return is_valid = false;
    bytes = data_.substr(at_, size);
    at_ += size;
    return true;
  }
};

// A connection that carries frames: a length, 4 bytes little-endian, and a message. The highest bit marks the last frame.
class Frames {
 public:
  ~Frames() { close(); }
  bool is_open() const { return socket_ >= 0; }

  bool open(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) return false;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    socket_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
    // A service that reads nothing must not stop the engine: a send that takes longer ends the connection.
    timeval limit{0, 100'000};
    ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) close();
    // The first frame is a bearer token, "Bearer ...", or empty.
    return is_open() && write("ssd.drafter.v1\n") && send("");
  }
  bool send(const std::string& message) {
    uint32_t size = uint32_t(message.size());
    return write(std::string(reinterpret_cast<char*>(&size), 4) + message);
  }
  // Returns whether a frame arrived before a time. Closes the connection at its end.
  bool receive(std::string& message, Clock::time_point until) {
    while (is_open()) {
      uint32_t header = 0;
      if (received_.size() >= 4) std::memcpy(&header, received_.data(), 4);
      size_t size = header & 0x7fffffff;
      if (received_.size() >= 4 && received_.size() >= 4 + size) {
        message = received_.substr(4, size);
        received_.erase(0, 4 + size);
        if (header >> 31) close();
        return is_open();
      }
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      pollfd wanted{socket_, POLLIN, 0};
      if (::poll(&wanted, 1, left > 0 ? int(left) : 0) <= 0) return false;
      char part[1 << 16];
      ssize_t count = ::recv(socket_, part, sizeof part, 0);
      if (count <= 0) close();
      else received_.append(part, size_t(count));
    }
    return false;
  }
  void end() { if (is_open()) ::shutdown(socket_, SHUT_WR); }
  void close() {
    if (is_open()) ::close(socket_);
    socket_ = -1;
    received_.clear();
  }

 private:
  int socket_ = -1;
  std::string received_;

  bool write(const std::string& data) {
    for (size_t at = 0; at < data.size();) {
      ssize_t count = ::send(socket_, data.data() + at, data.size() - at, MSG_NOSIGNAL);
      if (count <= 0) {
        close();
        return false;
      }
      at += size_t(count);
    }
    return true;
  }
};

// A running request. The engine calls `commit` after each step, and reads `draft` before the next.
struct Sequence {
  Tokens prompt, output, draft;

  // Record one step: its tokens, and how many tokens of the draft the target verified.
  void commit(const Tokens& tokens, size_t verified_tokens) {
    output.insert(output.end(), tokens.begin(), tokens.end());
    if (is_counted) verified = uint32_t(verified_tokens);
    is_counted = false;
    steps += 1;
    draft.clear();
  }

  // The drafter's part.
  uint64_t id = 0;          // Its id at the service; 0: the service does not have it.
  size_t sent = 0;          // Number of output tokens that the service has.
  uint32_t steps = 0;       // Number of steps since the last batch.
  uint32_t verified = 0;    // Verified tokens of the service's last draft.
  bool is_counted = false;  // Whether `draft` is the service's last draft.

  Tokens unsent() const { return Tokens(output.begin() + long(sent), output.end()); }
};

class Drafter {
 public:
  // path: the socket of `ssd-drafter serve --listen unix:PATH`. tokenizer: the SHA-256 of tokenizer.json, in hex.
  Drafter(const std::string& path, std::string model, std::string tokenizer, uint32_t vocab_size,
          std::chrono::milliseconds deadline)
      : path_(path + ".steps"), model_(model), tokenizer_(tokenizer), vocab_size_(vocab_size), deadline_(deadline) {}

  ~Drafter() {  // Wait until the service has the last ends.
    frames_.end();
    std::string message;
    while (frames_.receive(message, Clock::now() + std::chrono::seconds(2))) {}
  }

  // Report the progress of a batch, and set the draft of each sequence; limits: maximum lengths of the drafts.
  void draft(const std::vector<Sequence*>& batch, const std::vector<uint32_t>& limits) {
    for (Sequence* each : batch) each->draft.clear();
    if (pause_ > 0) {
      --pause_;
      return;
    }
    const Clock::time_point began = Clock::now();
    request_drafts(batch, limits);
    drafting_s_ += std::chrono::duration<double>(Clock::now() - began).count();
  }

  // Record a step that has run, from which the service learns how much to draft. tokens: one of each sequence, its verified
  // draft tokens, and tokens of prompts. seconds: its duration without `draft`.
  void record_step(uint32_t tokens, uint32_t sequences, double seconds) {
    if (step_tokens_.size() == 64) forget_steps();
    step_tokens_.push_back(tokens);
    step_sequences_.push_back(sequences);
    step_seconds_.push_back(seconds);
    drafting_seconds_.push_back(drafting_s_);
    drafting_s_ = 0;
  }

  // End a sequence. learn: whether its output may be drafted for other requests.
  void finish(Sequence& sequence, bool learn) {
    if (!frames_.is_open()) return;
    Writer request, message;
    if (sequence.id == 0) register_again(request, sequence);
    message.number(1, sequence.id);
    message.array(2, sequence.unsent());
    message.number(3, learn);
    message.number(4, sequence.verified);
    message.number(5, sequence.steps);
    request.bytes(4, message.data);
    send(request);
    sequence.id = 0;
  }

 private:
  std::string path_, model_, tokenizer_;
  uint32_t vocab_size_;
  std::chrono::milliseconds deadline_;
  Frames frames_;
  uint64_t step_ = 0, last_id_ = 0;
  uint64_t late_ = 0;  // Number of the request whose drafts are late; 0: none.
  Clock::time_point next_attempt_{};
  Tokens step_tokens_, step_sequences_;  // The steps since the last batch.
  std::vector<double> step_seconds_, drafting_seconds_;
  double drafting_s_ = 0;  // Time for which `draft` has delayed the next step.
  uint64_t pause_ = 0;     // Number of steps in which no drafts are requested, because they have not saved time.

  void forget_steps() {
    step_tokens_.clear();
    step_sequences_.clear();
    step_seconds_.clear();
    drafting_seconds_.clear();
  }

  void request_drafts(const std::vector<Sequence*>& batch, const std::vector<uint32_t>& limits) {
    if (!connect(batch) || is_late()) return;
    Writer request;
    std::vector<uint64_t> ids;
    Tokens tokens;
    std::vector<uint32_t> offsets{0}, verified, steps;
    for (Sequence* each : batch) {
      if (each->id == 0) register_again(request, *each);
      Tokens unsent = each->unsent();
      tokens.insert(tokens.end(), unsent.begin(), unsent.end());
      ids.push_back(each->id);
      offsets.push_back(uint32_t(tokens.size()));
      verified.push_back(each->verified);
      steps.push_back(each->steps);
      each->sent = each->output.size();
      each->verified = each->steps = 0;
    }
    Writer message;
    message.array(1, ids);
    message.array(2, tokens);
    message.array(3, offsets);
    message.array(4, verified);
    message.array(5, limits);
    message.array(7, steps);
    message.array(8, step_tokens_);
    message.array(9, step_sequences_);
    message.array(10, step_seconds_);
    message.array(11, drafting_seconds_);
    forget_steps();
    request.bytes(5, message.data);
    late_ = send(request);
    std::string response;
    if (await(late_, response, Clock::now() + deadline_)) {
      late_ = 0;
      read(response, batch);
    }
  }

  // Connect if there is no connection, at most every 50 ms. On a new stream the service has no sequences.
  bool connect(const std::vector<Sequence*>& batch) {
    if (frames_.is_open()) return true;
    for (Sequence* each : batch) forget(*each);
    if (Clock::now() < next_attempt_) return false;
    next_attempt_ = Clock::now() + std::chrono::milliseconds(50);
    late_ = 0;
    if (!frames_.open(path_)) return false;
    Writer model, hello, request;
    model.bytes(1, model_);
    model.bytes(2, tokenizer_);
    model.number(4, vocab_size_);
    hello.number(1, 3);  // The version of the protocol.
    hello.bytes(2, "cpp-example/1");
    hello.bytes(3, model.data);
    request.bytes(2, hello.data);
    std::string response;
    return await(send(request), response, Clock::now() + std::chrono::seconds(1));
  }

  void forget(Sequence& sequence) {
    sequence.id = sequence.sent = sequence.steps = sequence.verified = 0;
    sequence.is_counted = false;
  }

  // Add the start of a sequence with all of its tokens.
  void register_again(Writer& request, Sequence& sequence) {
    forget(sequence);
    sequence.id = ++last_id_;
    sequence.sent = sequence.output.size();
    Writer start;
    start.number(1, sequence.id);
    start.array(2, sequence.prompt);
    start.array(3, sequence.output);
    start.number(6, 1);  // It may be learned.
    request.bytes(3, start.data);
  }

  uint64_t send(Writer& request) {
    request.number(1, ++step_);
    frames_.send(request.data);
    return step_;
  }

  // Return whether the answer to a request is still missing after its deadline. Once it arrives, its drafts are dropped.
  bool is_late() {
    std::string response;
    if (late_ != 0 && await(late_, response, Clock::now())) {
      late_ = 0;
      read(response, {});
    }
    return late_ != 0 || !frames_.is_open();
  }

  // Wait for the response to a request, and skip those to earlier ones. An error closes the connection: the request had
  // no effect, and it is simplest to begin again.
  bool await(uint64_t step, std::string& response, Clock::time_point until) {
    while (frames_.receive(response, until)) {
      uint64_t answered = 0;
      bool is_error = false;
      Reader reader(response);
      while (reader.next()) {
        if (reader.field == 1) answered = reader.number;
        if (reader.field == 3) is_error = true;
      }
      if (is_error || !reader.is_valid) frames_.close();
      else if (answered == step) return true;
    }
    return false;
  }

  // Read the drafts of a response, and which sequences the service does not have.
  void read(const std::string& response, const std::vector<Sequence*>& batch) {
    Tokens tokens, offsets;
    std::vector<int32_t> parents;
    Reader reader(response);
    while (reader.next()) {
      if (reader.field == 5)
        for (uint64_t id : reader.array<uint64_t>())
          for (Sequence* each : batch)
            if (each->id == id) forget(*each);
      if (reader.field != 2) continue;
      Reader drafts(reader.bytes);
      while (drafts.next()) {
        if (drafts.field == 1) tokens = drafts.array<uint32_t>();
        if (drafts.field == 2) parents = drafts.array<int32_t>();
        if (drafts.field == 5) offsets = drafts.array<uint32_t>();
        if (drafts.field == 6) pause_ = drafts.number;
      }
    }
    if (offsets.size() != batch.size() + 1 || parents.size() != tokens.size()) return;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (batch[i]->id == 0 || offsets[i + 1] > tokens.size()) continue;
      batch[i]->is_counted = true;
      // The first tokens that are a path; a tree has further branches.
      for (uint32_t at = offsets[i]; at < offsets[i + 1] && parents[at] == int32_t(at - offsets[i]) - 1; ++at)
        if (tokens[at] < vocab_size_) batch[i]->draft.push_back(tokens[at]);
        else break;
    }
  }
};

}  // namespace ssd
