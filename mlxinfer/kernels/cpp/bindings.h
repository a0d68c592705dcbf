// What each file needs to put its functions into the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "kernel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kernels {
void bind_norm(nb::module_& m);
void bind_rope(nb::module_& m);
void bind_activation(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_product(nb::module_& m);
void bind_softmax(nb::module_& m);
void bind_probe(nb::module_& m);
}
