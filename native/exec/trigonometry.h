// Cosine and sine in binary64 by our own routine: the C library's differ in the last bit from CPU to CPU.
#pragma once

namespace neoserve {

// |angle| <= 2^30; absolute error below 1e-11.
void cos_sin(double angle, double& cosine, double& sine);

}  // namespace neoserve
