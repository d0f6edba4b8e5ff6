#include "heartbeat.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

namespace commlib {

using Clock = std::chrono::steady_clock;

Heartbeat::Heartbeat(int fd, double interval_s)
    : pid_(getpid()), interval_s_(interval_s), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)), thread_([this] { run(); }) {}

Heartbeat::~Heartbeat() {
  close();
}

int Heartbeat::send(const char* data, std::size_t size, double timeout_s) {
  const std::lock_guard<std::mutex> sending(sending_);
  if (fd_ < 0) return EBADF;
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  while (size != 0) {
    const ssize_t sent = ::send(fd_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      data += sent;
      size -= static_cast<std::size_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return errno;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return ETIMEDOUT;
    pollfd ready{fd_, POLLOUT, 0};
    if (poll(&ready, 1, static_cast<int>(left)) < 0 && errno != EINTR) return errno;
  }
  return 0;
}

void Heartbeat::close() {
  if (getpid() != pid_) {
    if (thread_.joinable()) thread_.detach();
  } else {
    {
      const std::lock_guard<std::mutex> stopping(stopping_);
      is_stopping_ = true;
    }
    stop_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Heartbeat::run() {
  const auto interval = std::chrono::duration<double>(interval_s_);
  std::unique_lock<std::mutex> stopping(stopping_);
  while (!stop_.wait_for(stopping, interval, [this] { return is_stopping_; })) {
    // A message that is being sent shows that the process runs. A full socket or an error is left to the other threads.
    const std::unique_lock<std::mutex> sending(sending_, std::try_to_lock);
    if (!sending.owns_lock()) continue;
    const char beat = 0;
    const ssize_t sent = ::send(fd_, &beat, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent;
  }
}

}  // namespace commlib
