#include "fake_matmul.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using lt::Status;
using lt::Type;

double Read(const void* p, Type t, int64_t i) {
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

}  // namespace

Status Bad(const char* why) {
  std::fprintf(stderr, "fake cublasLt: %s\n", why);
  return Status::kInvalidValue;
}

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
  if (a.type != b.type || c.type != o.type) return Status::kNotSupported;
  if (o.type != a.type && o.type != Type::kF32) return Status::kNotSupported;
  if (d.compute == lt::Compute::kF32FastTF32 && a.type != Type::kF32) return Status::kNotSupported;
  if (Has(d, lt::Epilogue::kBias) && !d.bias) return Bad("no bias pointer");
  if (Has(d, lt::Epilogue::kAux) && (!d.aux || d.aux_ld % 8 || d.aux_ld < int64_t(m))) {
    return Bad("aux");
  }
  const char* refuses = std::getenv("FAKE_CUBLASLT_REFUSES");
  if (!refuses) return Status::kSuccess;
  const bool all = std::strcmp(refuses, "all") == 0;
  return all || Has(d, lt::Epilogue::kGelu) ? Status::kNotSupported : Status::kSuccess;
}

void Compute(const FakeDesc& d, double alpha, const void* A, const FakeLayout& a, const void* B,
             const FakeLayout& b, double beta, const void* C, const FakeLayout& c, void* O,
             const FakeLayout& o) {
  const int64_t m = o.rows, n = o.cols, k = d.transa ? a.rows : a.cols;
  std::vector<double> av(m * k), bv(k * n);
  for (int64_t z = 0; z < o.batch; ++z) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t q = 0; q < k; ++q) {
        av[i * k + q] = Read(A, a.type, z * a.stride + (d.transa ? q + i * a.ld : i + q * a.ld));
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t q = 0; q < k; ++q) {
        bv[j * k + q] = Read(B, b.type, z * b.stride + (d.transb ? j + q * b.ld : q + j * b.ld));
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < m; ++i) {
        double v = 0;
        for (int64_t q = 0; q < k; ++q) v += av[i * k + q] * bv[j * k + q];
        v *= alpha;
        if (beta != 0) v += beta * Read(C, c.type, z * c.stride + i + j * c.ld);
        if (Has(d, lt::Epilogue::kBias)) v += Read(d.bias, o.type, i);
        if (Has(d, lt::Epilogue::kAux)) {
          Write(d.aux, o.type, z * d.aux_stride + i + j * d.aux_ld, v);
        }
        if (Has(d, lt::Epilogue::kGelu)) v = Gelu(v);
        Write(O, o.type, z * o.stride + i + j * o.ld, v);
      }
    }
  }
}
