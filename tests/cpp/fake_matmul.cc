#include "fake_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

namespace {

using lt::Status;
using lt::Type;

bool Narrow(Type t) { return t == Type::kF8E4M3 || t == Type::kF8E5M2; }

// E4M3 has no infinity and one NaN; E5M2 is as IEEE numbers are.
double ReadNarrow(uint8_t bits, Type t) {
  const int mantissa_bits = t == Type::kF8E4M3 ? 3 : 2, bias = t == Type::kF8E4M3 ? 7 : 15;
  const int exponent = (bits & 0x7f) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x80 ? -1 : 1;
  if (t == Type::kF8E4M3 && (bits & 0x7f) == 0x7f) return NAN;
  if (t == Type::kF8E5M2 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
  const int whole = exponent ? 1 << mantissa_bits : 0;
  return sign * std::ldexp(whole + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
}

double Read(const void* p, Type t, int64_t i) {
  if (Narrow(t)) return ReadNarrow(static_cast<const uint8_t*>(p)[i], t);
  if (t == Type::kF32) return static_cast<const float*>(p)[i];
  if (t == Type::kF16) return static_cast<double>(static_cast<const _Float16*>(p)[i]);
  const uint32_t word = uint32_t{static_cast<const uint16_t*>(p)[i]} << 16;
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}

void Write(void* p, Type t, int64_t i, double value) {
  const float f = static_cast<float>(value);
  if (t == Type::kF32) {
    static_cast<float*>(p)[i] = f;
  } else if (t == Type::kF16) {
    static_cast<_Float16*>(p)[i] = static_cast<_Float16>(f);
  } else {
    uint32_t word;
    std::memcpy(&word, &f, 4);
    if (!std::isnan(f)) word += 0x7fff + ((word >> 16) & 1);
    static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(word >> 16);
  }
}

double Gelu(double x) {
  constexpr double kRoot = 0.79788456080286535588;  // sqrt(2 / pi)
  return 0.5 * x * (1 + std::tanh(kRoot * (x + 0.044715 * x * x * x)));
}

bool Has(const FakeDesc& d, lt::Epilogue part) {
  return d.epilogue != uint32_t(lt::Epilogue::kNone) && (d.epilogue & uint32_t(part));
}

Type BiasType(const FakeDesc& d, const FakeLayout& o) {
  return d.bias_type < 0 ? o.type : static_cast<Type>(d.bias_type);
}

}  // namespace

Status Bad(const char* why) {
  std::fprintf(stderr, "fake cublasLt: %s\n", why);
  return Status::kInvalidValue;
}

namespace {

// What element (row, q) of an operand [rows, k] is multiplied by.
double ScaleAt(lt::Scale mode, const void* p, int64_t rows, int64_t k, int64_t row, int64_t q) {
  if (!p) return 1;
  const float* f = static_cast<const float*>(p);
  const int64_t blocks = (k + 127) / 128;
  if (mode == lt::Scale::kTensor) return f[0];
  if (mode == lt::Scale::kVec128) return f[q / 128 * rows + row];
  if (mode == lt::Scale::kBlock128x128) return f[row / 128 * ((blocks + 3) / 4 * 4) + q / 128];
  // Tiles of 128 rows by 4 blocks of 32; in one, 16 bytes a row modulo 32.
  const int64_t tile = row / 128 * blocks + q / 128;
  const int64_t at = tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + q / 32 % 4;
  return std::ldexp(1.0, static_cast<const uint8_t*>(p)[at] - 127);
}

bool Blocks128(lt::Scale s) { return s == lt::Scale::kVec128 || s == lt::Scale::kBlock128x128; }

Status SupportedNarrow(const FakeDesc& d, const FakeLayout& a, const FakeLayout& b,
                       const FakeLayout& o) {
  constexpr Status no = Status::kNotSupported;
  const char* given = std::getenv("FAKE_CUBLASLT_SM");
  const int sm = given ? std::atoi(given) : 90;
  if (!Narrow(a.type) || !Narrow(b.type) || Narrow(o.type)) return no;
  if (a.type == Type::kF8E5M2 && b.type == Type::kF8E5M2) return no;
  if (!d.transa || d.transb) return no;
  if (o.rows % 16 || a.rows % 16 || a.ld % 16 || b.ld % 16) return no;
  const lt::Scale as = d.a_mode, bs = d.b_mode;
  if (Blocks128(as) != Blocks128(bs) || (as == lt::Scale::kVec32) != (bs == lt::Scale::kVec32)) {
    return no;
  }
  if (as == lt::Scale::kBlock128x128 && bs == as) return no;
  if (as == lt::Scale::kVec32 && sm < 100) return no;
  if (Blocks128(as) && (sm != 90 || d.fast)) return no;
  if (as != lt::Scale::kTensor) {
    if (!d.a_scale || !d.b_scale) return Bad("no pointer to scales of blocks");
    if (o.batch > 1 || (bs == lt::Scale::kVec128 && o.cols % 4)) return no;
  }
  for (const void* p : {d.a_scale, d.b_scale}) {
    if (reinterpret_cast<uintptr_t>(p) % 16) return Bad("alignment of scales");
  }
  const Type bias = o.type == Type::kF32 ? Type::kBF16 : o.type;
  if (Has(d, lt::Epilogue::kBias) && BiasType(d, o) != bias) return no;
  return Status::kSuccess;
}

}  // namespace

Status Supported(const FakeDesc& d, const FakeLayout& a, const FakeLayout& b, const FakeLayout& c,
                 const FakeLayout& o) {
  const uint64_t m = o.rows, n = o.cols, k = d.transa ? a.rows : a.cols;
  if ((d.transa ? a.cols : a.rows) != m || (d.transb ? b.rows : b.cols) != n ||
      (d.transb ? b.cols : b.rows) != k || c.rows != m || c.cols != n) {
    return Bad("shapes disagree");
  }
  for (const FakeLayout* l : {&a, &b, &c, &o}) {
    if (l->ld < int64_t(l->rows)) return Bad("leading dimension");
    if (l->batch != o.batch) return Bad("batch");
  }
  if (c.type != o.type) return Status::kNotSupported;
  const bool narrow = Narrow(a.type) || Narrow(b.type);
  if (narrow) {
    const Status s = SupportedNarrow(d, a, b, o);
    if (s != Status::kSuccess) return s;
  } else if (a.type != b.type || (o.type != a.type && o.type != Type::kF32) || d.a_scale ||
             d.b_scale || d.fast) {
    return Status::kNotSupported;
  }
  if (d.compute == lt::Compute::kF32FastTF32 && a.type != Type::kF32) return Status::kNotSupported;
  if (Has(d, lt::Epilogue::kBias) && !d.bias) return Bad("no bias pointer");
  if (Has(d, lt::Epilogue::kAux) && (!d.aux || d.aux_ld % 8 || d.aux_ld < int64_t(m))) {
    return Bad("aux");
  }
  const char* refuses = std::getenv("FAKE_CUBLASLT_REFUSES");
  if (!refuses) return Status::kSuccess;
  const std::string_view what = refuses;
  const bool refused = what == "fp8" ? narrow : what == "all" || Has(d, lt::Epilogue::kGelu);
  return refused ? Status::kNotSupported : Status::kSuccess;
}

void Compute(const FakeDesc& d, double alpha, const void* A, const FakeLayout& a, const void* B,
             const FakeLayout& b, double beta, const void* C, const FakeLayout& c, void* O,
             const FakeLayout& o) {
  const int64_t m = o.rows, n = o.cols, k = d.transa ? a.rows : a.cols;
  std::vector<double> av(m * k), bv(k * n);
  for (int64_t z = 0; z < o.batch; ++z) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t q = 0; q < k; ++q) {
        av[i * k + q] = Read(A, a.type, z * a.stride + (d.transa ? q + i * a.ld : i + q * a.ld)) *
                        ScaleAt(d.a_mode, d.a_scale, m, k, i, q);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t q = 0; q < k; ++q) {
        bv[j * k + q] = Read(B, b.type, z * b.stride + (d.transb ? j + q * b.ld : q + j * b.ld)) *
                        ScaleAt(d.b_mode, d.b_scale, n, k, j, q);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < m; ++i) {
        double v = 0;
        for (int64_t q = 0; q < k; ++q) v += av[i * k + q] * bv[j * k + q];
        v *= alpha;
        if (beta != 0) v += beta * Read(C, c.type, z * c.stride + i + j * c.ld);
        if (Has(d, lt::Epilogue::kBias)) v += Read(d.bias, BiasType(d, o), i);
        if (Has(d, lt::Epilogue::kAux)) {
          Write(d.aux, o.type, z * d.aux_stride + i + j * d.aux_ld, v);
        }
        if (Has(d, lt::Epilogue::kGelu)) v = Gelu(v);
        if (Has(d, lt::Epilogue::kRelu)) v = v < 0 ? 0 : v;  // NaN stays
        Write(O, o.type, z * o.stride + i + j * o.ld, v);
      }
    }
  }
}
