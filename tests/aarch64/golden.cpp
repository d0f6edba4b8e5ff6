// Holds one instruction set's kernels to golden files, without Python:
//   golden ISA [CODEC IS_RANDOM INPUT PAYLOAD DECODED]...
// CODEC is the number of a block codec, the others are files without headers. Says what differs; the exit status counts
// it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "codec.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) std::fprintf(stderr, "%s cannot be read\n", path), std::exit(100);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

// As tests/golden/generate.py has it.
const commlib::Segment kSegment = {0, 5};
const commlib::Random kRandom = {{42, 0}, 1, 3u << 24 | 2u, &kSegment, 1};

Bytes encode(int codec, bool is_random, const Bytes& input) {
  const std::size_t numel = input.size() / sizeof(float);
  const commlib::Layout layout(*commlib::find_shape(codec), numel);
  Bytes payload(layout.payload_bytes);
  commlib::EncodeJob job = {
      input.data(), commlib::DType::kFloat32, nullptr, 0,    1.0f, nullptr, 1.0f, 1.0f, nullptr, 0, numel,
      layout,       payload.data(),           false,   false};
  if (is_random) job.random = &kRandom;
  commlib::encode_chunk(codec, job, 1);
  return payload;
}

Bytes decode(int codec, const Bytes& payload, std::size_t numel) {
  const std::uint8_t* at = payload.data();
  Bytes out(numel * sizeof(float));
  const commlib::Layout layout(*commlib::find_shape(codec), numel);
  commlib::decode_chunk(codec, {&at, 1, 1.0f, false, 1.0f, out.data(), commlib::DType::kFloat32, numel, layout, false},
                        1);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7 || argc % 5 != 2) return 101;
  commlib::select_isa(argv[1]);
  int wrong = 0;
  for (char** file = argv + 2; file < argv + argc; file += 5) {
    const int codec = std::atoi(file[0]);
    const Bytes input = read(file[2]), payload = read(file[3]), decoded = read(file[4]);
    const bool encodes = encode(codec, std::strcmp(file[1], "1") == 0, input) == payload;
    const bool decodes = decode(codec, payload, input.size() / sizeof(float)) == decoded;
    if (!encodes) std::printf("%s: not what %s encodes\n", file[3], argv[1]), ++wrong;
    if (!decodes) std::printf("%s: not what %s decodes\n", file[4], argv[1]), ++wrong;
  }
  std::printf("%d files, %d differences\n", (argc - 2) / 5, wrong);
  return wrong;
}
