#include "exec/trigonometry.h"

#include <cstdint>

namespace neoserve {
namespace {

// pi / 2 in three parts of at most 33 significant bits: k * part is exact for |k| < 2^20 (Cody and Waite), and the
// remainder stays accurate beyond, since angles come from binary32.
constexpr double kHalfPi1 = 1.57079632673412561417e+00, kHalfPi2 = 6.07710050630396597660e-11,
                 kHalfPi3 = 2.02226624879595063154e-21;
constexpr double kTwoOverPi = 6.36619772367581382433e-01;

// Taylor polynomials on [-pi/4, pi/4]; the first omitted terms are below 1e-14.
double sine_near_zero(double x) {
  const double z = x * x;
  double p = -1.0 / 1307674368000.0;
  p = p * z + 1.0 / 6227020800.0;
  p = p * z - 1.0 / 39916800.0;
  p = p * z + 1.0 / 362880.0;
  p = p * z - 1.0 / 5040.0;
  p = p * z + 1.0 / 120.0;
  p = p * z - 1.0 / 6.0;
  return x + x * z * p;
}

double cosine_near_zero(double x) {
  const double z = x * x;
  double p = 1.0 / 20922789888000.0;
  p = p * z - 1.0 / 87178291200.0;
  p = p * z + 1.0 / 479001600.0;
  p = p * z - 1.0 / 3628800.0;
  p = p * z + 1.0 / 40320.0;
  p = p * z - 1.0 / 720.0;
  p = p * z + 1.0 / 24.0;
  p = p * z - 0.5;
  return 1.0 + z * p;
}

}  // namespace

void cos_sin(double angle, double& cosine, double& sine) {
  const double quarter = angle * kTwoOverPi;
  const int64_t k = static_cast<int64_t>(quarter < 0 ? quarter - 0.5 : quarter + 0.5);
  const double n = static_cast<double>(k);
  const double r = ((angle - n * kHalfPi1) - n * kHalfPi2) - n * kHalfPi3;
  const double s = sine_near_zero(r), c = cosine_near_zero(r);
  switch (k & 3) {
    case 0:
      cosine = c, sine = s;
      return;
    case 1:
      cosine = -s, sine = c;
      return;
    case 2:
      cosine = -c, sine = -s;
      return;
    default:
      cosine = s, sine = -c;
  }
}

}  // namespace neoserve
