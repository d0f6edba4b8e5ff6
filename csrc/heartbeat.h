// Heartbeats on a connection of commlib/elastic, sent by a thread that does not need the interpreter.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

namespace commlib {

// The sending side of a connected socket: messages from any thread, and a byte 0 between them at an interval, which
// shows that the process runs. The process may hold the interpreter lock for any time meanwhile.
class Heartbeat {
 public:
  // `fd` is duplicated. Sends the first heartbeat after `interval_s` seconds.
  Heartbeat(int fd, double interval_s);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Sends all bytes without a heartbeat between them. Returns 0, or the error number: ETIMEDOUT if the peer did not
  // take them within `timeout_s` seconds, which leaves the connection unusable.
  int send(const char* data, std::size_t size, double timeout_s);

  // Ends the heartbeats. Idempotent. In a forked child, where the thread does not exist, only closes the copy of `fd`.
  void close();

 private:
  void run();

  const int pid_;
  const double interval_s_;
  int fd_;
  bool is_stopping_ = false;
  std::mutex sending_;   // held while bytes are sent
  std::mutex stopping_;  // guards is_stopping_
  std::condition_variable stop_;
  std::thread thread_;
};

}  // namespace commlib
