#pragma once
#include "gemm_reduce_scatter.cuh"
#include "mirror_owned.cuh"
