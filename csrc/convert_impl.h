// The types that kernels read and write, their conversions from and to float32, and the gathering kernel, written once.
// Each kernels_<isa>.cpp includes this file inside its own namespace, after selecting its instruction set, so that the
// compiler generates one version per instruction set. Hence no include guard, and no #include here: no code of the
// standard library may be compiled for an instruction set that was not checked for.
//
// [Note: casts]
// Arithmetic is in float32 (float64 for float64), followed by one rounding to nearest, ties to even. Denormals are
// kept. A narrow type writes NaN as the positive quiet NaN without payload (0x7FC00000, 0x7FC0, 0x7E00): hardware
// differs in sign and payload, but bytes on the wire must not.

struct Float32 {
  using Storage = float;
  using Compute = float;
  static inline float load(float x) { return x; }
  static inline float store(float x) { return x; }
};

struct Float64 {
  using Storage = double;
  using Compute = double;
  static inline double load(double x) { return x; }
  static inline double store(double x) { return x; }
};

struct BFloat16 {
  using Storage = std::uint16_t;
  using Compute = float;
  static inline float load(std::uint16_t x) { return from_bits(static_cast<std::uint32_t>(x) << 16); }
  static inline std::uint16_t store(float x) {
    const std::uint32_t bits = to_bits(x);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return static_cast<std::uint16_t>(is_nan ? 0x7FC0u : rounded);
  }
};

struct Float16 {
  using Storage = std::uint16_t;
  using Compute = float;

  // Exponents are shifted with two exact float operations, so that denormals need no branch.
  static inline float load(std::uint16_t x) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(x & 0x7FFFu) << 13;
    const float shifted = from_bits(magnitude) * 0x1.0p112f;
    const std::uint32_t bits = (x & 0x7C00u) == 0x7C00u ? magnitude | 0x7F800000u : to_bits(shifted);
    return from_bits(bits | static_cast<std::uint32_t>(x & 0x8000u) << 16);
  }

  // Adding a power of two that matches the last kept bit makes the float adder round. Scaling up and down first turns
  // values that are too large into infinity.
  static inline std::uint16_t store(float x) {
    const std::uint32_t bits = to_bits(x);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    const float saturated = (from_bits(magnitude) * 0x1.0p112f) * 0x1.0p-110f;
    const std::uint32_t exponent = magnitude & 0x7F800000u;
    const std::uint32_t bias = (exponent < 0x38800000u ? 0x38800000u : exponent) + 0x07800000u;
    const std::uint32_t summed = to_bits(from_bits(bias) + saturated);
    const std::uint32_t rounded = ((summed >> 13) & 0x7C00u) + (summed & 0x0FFFu);
    return static_cast<std::uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : rounded | ((bits >> 16) & 0x8000u));
  }
};

template <class In>
static inline void load_as(const void* src, std::size_t at, std::size_t m, float* v) {
  const auto* x = static_cast<const typename In::Storage*>(src) + at;
  for (std::size_t i = 0; i < m; ++i) v[i] = static_cast<float>(In::load(x[i]));
}

static inline void load_values(const void* src, DType type, std::size_t at, std::size_t m, float* v) {
  switch (type) {
    case DType::kFloat32:
      return load_as<Float32>(src, at, m, v);
    case DType::kBFloat16:
      return load_as<BFloat16>(src, at, m, v);
    case DType::kFloat16:
      return load_as<Float16>(src, at, m, v);
    case DType::kFloat64:
      return load_as<Float64>(src, at, m, v);
  }
}

template <class Out>
static inline void store_as(void* dst, std::size_t at, std::size_t m, const float* v) {
  auto* x = static_cast<typename Out::Storage*>(dst) + at;
  for (std::size_t i = 0; i < m; ++i) x[i] = Out::store(canonical(v[i]));
}

static inline void store_values(void* dst, DType type, std::size_t at, std::size_t m, const float* v) {
  switch (type) {
    case DType::kFloat32:
      return store_as<Float32>(dst, at, m, v);
    case DType::kBFloat16:
      return store_as<BFloat16>(dst, at, m, v);
    case DType::kFloat16:
      return store_as<Float16>(dst, at, m, v);
    case DType::kFloat64:
      return store_as<Float64>(dst, at, m, v);
  }
}

template <class Type>
static void scale(void* dst, const void* src, std::size_t count, double by) {
  const auto* in = static_cast<const typename Type::Storage*>(src);
  auto* out = static_cast<typename Type::Storage*>(dst);
  const auto factor = static_cast<typename Type::Compute>(by);
  COMMLIB_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) out[i] = Type::store(Type::load(in[i]) * factor);
}

static Kernels make_kernels(const char* name, const CodecKernels* codecs, const SparseKernels* sparse) {
  return Kernels{
      name,
      {scale<Float32>, scale<BFloat16>, scale<Float16>, scale<Float64>},
      codecs,
      sparse,
  };
}
