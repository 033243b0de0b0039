// A wave's share of attention on its matrix unit: who holds which score, probability and output.
//
// Kernels are written against `Fragments<Config, kColumns, kQueryScales>` alone. Slots are the query columns of a lane; a lane holds
// the same columns in scores and in outputs, so that softmax needs no exchange between the two.
#pragma once
#include "quantkv/arch.h"

#if QUANTKV_MAP == QUANTKV_MAP_MMA
#include "quantkv/fragments_mma.h"
#else
#include "quantkv/fragments_wave64.h"
#endif
