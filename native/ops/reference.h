// The portable reference rows: always built, always last in every list; the fallback and the oracle of all others.
#pragma once

#include "ops/contract.h"

namespace neoserve {
RowTable reference_rows();
}
