// The kernels of one instruction set as a table of functions over raw pointers, and the choice between the tables.
//
// Arguments are plain structs, so that the files compiled per instruction set need nothing of mlx.
#pragma once

#include "activation_table.h"
#include "attention_table.h"
#include "norm_table.h"
#include "probe_table.h"
#include "product_table.h"
#include "rope_table.h"
#include "softmax_table.h"

namespace kernels {

struct Table {
  const char* name;
  int width;  // floats in a vector
  NormTable norm;
  RopeTable rope;
  ActivationTable activation;
  AttentionTable attention;
  ProductTable product;
  SoftmaxTable softmax;
  ProbeTable probe;
};

// The table for this processor, or for MLXINFER_KERNELS_ISA, where that names one the processor has.
const Table& table();

}  // namespace kernels
