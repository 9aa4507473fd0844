// Tensors from DLPack. The structs are as dlpack.h has them (ABI version 1), written out so that
// the test needs no package.
#include "check.h"

typedef struct {
  int32_t device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;

enum { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLCPU = 1 };

int main(void) {
  static const struct {
    DLDataType from;
    unsloth_dtype to;
  } dtypes[] = {
      {{kDLFloat, 32, 1}, UNSLOTH_DTYPE_F32},   {{kDLFloat, 16, 1}, UNSLOTH_DTYPE_F16},
      {{kDLBfloat, 16, 1}, UNSLOTH_DTYPE_BF16}, {{kDLInt, 32, 1}, UNSLOTH_DTYPE_I32},
      {{kDLInt, 64, 1}, UNSLOTH_DTYPE_I64},     {{kDLBool, 8, 1}, UNSLOTH_DTYPE_BOOL},
  };
  float data[24];
  int64_t shape[3] = {2, 3, 2}, strides[3] = {12, 4, 1};
  DLTensor dl;
  unsloth_tensor t;
  int32_t device_type = 0, device_id = -1;

  memset(&dl, 0, sizeof dl);
  dl.data = data;
  dl.device.device_type = kDLCPU;
  dl.ndim = 3;
  dl.shape = shape;
  dl.strides = strides;
  dl.byte_offset = 8;
  for (size_t i = 0; i < COUNT(dtypes); i++) {
    dl.dtype = dtypes[i].from;
    CHECK_OK(unsloth_tensor_from_dlpack(&dl, &t, &device_type, &device_id));
    CHECK(t.dtype == dtypes[i].to && t.rank == 3);
    CHECK(t.data == (void *)(data + 2));
    CHECK(memcmp(t.shape, shape, sizeof shape) == 0);
    CHECK(memcmp(t.strides, strides, sizeof strides) == 0);
    CHECK(device_type == kDLCPU && device_id == 0);
  }

  // Without strides it is row-major.
  dl.strides = NULL;
  CHECK_OK(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL));
  for (int i = 0; i < UNSLOTH_MAX_RANK; i++) CHECK(t.strides[i] == 0 || i < 3);

  memset(&t, 7, sizeof t);
  dl.dtype.lanes = 4;
  CHECK_STATUS(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL), UNSLOTH_STATUS_UNSUPPORTED);
  dl.dtype.lanes = 1;
  dl.ndim = 7;
  CHECK_FAILS(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "tensor_from_dlpack: ndim is 7, allowed: 1 to 6");
  CHECK(t.rank == 0x07070707);
  return 0;
}
