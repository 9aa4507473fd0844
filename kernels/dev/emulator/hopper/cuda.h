// What kernels take of the driver's header.
#pragma once

#include "device.h"

using CUtensorMap = machine::TensorMap;
