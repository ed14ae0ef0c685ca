// Uses every function of ptx.cuh once (test_cuda.py checks that none is
// missing). Compiled only, never run.
#pragma once
namespace mkernel {

struct alignas(64) Parameters {
  abi::World world;
  uint64_t memory;
  abi::TensorMap map;
};

MK_DEVICE void multiply(char *smem) {
  constexpr ptx::Element kElement =
      Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  constexpr ptx::Major kA = Config::kTransposed ? ptx::Major::kMN
                                                : ptx::Major::kK,
                       kB = Config::kTransposed ? ptx::Major::kK
                                                : ptx::Major::kMN;
  float d[Config::kWidth / 2];
  const uint64_t descriptor = ptx::matrix_descriptor(smem, 16, 1024);
#pragma unroll 1
  for (uint32_t i = 0; i < Config::kLanes; ++i) {
    ptx::wgmma_fence();
    ptx::wgmma<Config::kWidth, kElement, kA, kB>(d, descriptor + i,
                                                 descriptor + i, i != 0);
    ptx::wgmma_commit();
    ptx::wgmma_step<Config::kWidth, kElement, kA>(d, descriptor, descriptor, true);
    ptx::wgmma_wait<0>(d);
  }
  float sum = 0.0f;
  for (float x : d)
    sum += x;
  reinterpret_cast<volatile float *>(smem)[ptx::thread_index()] = sum;
}

MK_DEVICE void multiply_registers(char *smem) {
  constexpr ptx::Element kElement =
      Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  const uint32_t t = ptx::thread_index(), a[4] = {t, t + 1, t + 2, t + 3};
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma_registers<64, kElement,
                       Config::kTransposed ? ptx::Major::kK : ptx::Major::kMN>(
      d, a,
      ptx::advance_descriptor(ptx::warp_descriptor(ptx::matrix_descriptor(smem, 16, 1024)), 2048),
      false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  float sum = 0.0f;
  for (float x : d)
    sum += x;
  reinterpret_cast<volatile float *>(smem)[t] =
      ptx::maximum(ptx::log2(sum), ptx::shuffle_xor(sum, 1));
}

MK_DEVICE void words(char *smem, ptx::Words *packets) {
  ptx::Words v = ptx::any_words();
  ptx::load_packet_if(v.word[0] != 0, v, packets);
  ptx::store_shared(smem, v);
  v = ptx::load_shared(smem + 16);
  float low, high, sum = ptx::any_value();
  ptx::unpack<ptx::Element::kBFloat16>(v.word[0], low, high);
  sum += low + high;
  ptx::unpack<ptx::Element::kFloat16>(v.word[1], low, high);
  v.word[2] = ptx::bits(ptx::reciprocal(sum + low) + ptx::exp2(high) +
                        ptx::from_bits(v.word[3]));
  ptx::store_packet(packets + 1, v);
  ptx::store_packet_if(v.word[2] != 0, packets + 7, v);
  ptx::load_pairs_if(v.word[1] != 0, v, packets + 8);
  ptx::store_pairs(packets + 6, v);
  ptx::store_global(packets + 2, ptx::load_input(packets + 3));
  ptx::store_global(packets + 4, ptx::load_global(packets + 5));
  ptx::shared_add(reinterpret_cast<uint32_t *>(smem), 1);
  ptx::shared_or(reinterpret_cast<uint32_t *>(smem + 4), 2);
  uint64_t *shared = reinterpret_cast<uint64_t *>(smem + 32);
  ptx::store_release_shared(shared, ptx::load_acquire_shared(shared + 1));
}

MK_DEVICE void collective(char *smem) {
  ptx::sync_cta();
  ptx::sync_warp();
  ptx::barrier_arrive(1, Config::kThreads);
  ptx::barrier_sync(2, Config::kThreads);
  uint32_t votes = ptx::all_of_warp(ptx::lane_index() < Config::kLanes) +
                   ptx::any_of_warp(ptx::thread_index() < Config::kLanes) +
                   ptx::elected();
  votes += ptx::broadcast(votes, 3) + ptx::votes(votes > 1);
  ptx::stmatrix_x4(smem, votes, ptx::pack<ptx::Element::kBFloat16>(1.0f, 2.0f),
                   ptx::pack<ptx::Element::kFloat16>(1.0f, 2.0f), 0);
  ptx::stmatrix_x4_transposed(smem + 512, votes, votes, 0, 0);
  if (ptx::warp_index() < 4) {
    ptx::registers_decrease<40>();
  } else {
    ptx::registers_increase<232>();
    multiply(smem);
    multiply_registers(smem);
  }
}

MK_DEVICE void asynchronous(char *smem, uint64_t *bar, char *global,
                            const abi::TensorMap *map) {
  ptx::mbarrier_init(bar, 1);
  ptx::mbarrier_init_fence();
  ptx::fence_proxy_async_shared();
  ptx::mbarrier_arrive_expect(bar, 2 * 8192 + 16);
  ptx::tma_load_3d(smem, map, bar, 0, 1, 2);
  ptx::tma_load_4d(smem + 16384, map, bar, 0, 1, 2, 3);
  ptx::tma_load_3d_multicast(smem + 24576, map, bar, 3, 0, 1, 2);
  ptx::bulk_load(smem + 8192, global, 16, bar);
  ptx::mbarrier_wait(bar, 0);
  ptx::mbarrier_arrive(bar);
  while (!ptx::mbarrier_test(bar, 0) || !ptx::mbarrier_try_wait(bar, 1)) {
  }
  ptx::fence_proxy_async();
  ptx::tma_store_3d(map, smem, 0, 1, 2);
  ptx::tma_store_4d(map, smem, 0, 1, 2, 3);
  ptx::store_commit();
  ptx::bulk_store(global, smem + ptx::shared_address(smem) % 16, 16);
  ptx::store_commit();
  ptx::store_wait_read<1>();
  ptx::store_wait<0>();
}

MK_DEVICE void memory(uint64_t *words) {
  uint32_t *halves = reinterpret_cast<uint32_t *>(words);
  uint32_t sum =
      ptx::atomic_add(halves, 1u) + ptx::atomic_add_acq_rel(halves + 1, 1u);
  sum += ptx::compare_and_swap(halves + 2, 0, sum) +
         ptx::load_acquire_gpu(halves + 3) +
         uint32_t(ptx::load_for_thread(words + 2));
  ptx::store_release_sys(halves + 4, sum + ptx::cta_index() + ptx::cta_count());
  const uint64_t now =
      ptx::clock_ns() + ptx::atomic_add(words + 3, uint64_t(1));
  while (ptx::load_acquire_sys(words + 4) < now)
    ptx::pause(words + 4, now, now);
  ptx::store_release_sys(words + 5, now);
  ptx::add_release(words + 6, now);
  ptx::store_release_gpu(words + 5, now);
  const ptx::WordPair pair = ptx::load_acquire_sys_pair(words + 8);
  ptx::pause_until(words + 4, now, now);
  ptx::store_byte(halves + 17, ptx::load_byte(halves + 18));
  ptx::store_word(halves + 14,
                  ptx::load_word(halves + 15) +
                      ptx::count_bits(ptx::load_input_word(halves + 16)));
}

MK_DEVICE void cluster(uint64_t *bar, uint32_t *word) {
  const uint32_t other = 1 - ptx::cluster_rank();
  ptx::cluster_post(word, bar, other, ptx::cluster_address(word, other));
  ptx::cluster_post_words(reinterpret_cast<ptx::Words *>(word), bar, other, ptx::any_words());
  ptx::cluster_arrive_relaxed(bar, other);
  ptx::cluster_arrive(bar, other);
  ptx::cluster_give_back(bar, other);
  ptx::cluster_give_back_by(ptx::lane_index(), 2, bar, other);
  ptx::cluster_wait(bar, 0);
}

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  char *smem = ptx::shared_memory();
  ptx::cluster_come();
  ptx::cluster_meet();
  ptx::prefetch_map(&p.map);
  ptx::launch_grids();
  ptx::wait_for_grids();
  collective(smem);
  if (ptx::thread_index() == 0) {
    asynchronous(smem, reinterpret_cast<uint64_t *>(smem + 65536),
                 reinterpret_cast<char *>(p.memory), &p.map);
    memory(reinterpret_cast<uint64_t *>(p.memory));
    words(smem, reinterpret_cast<ptx::Words *>(p.memory));
    cluster(reinterpret_cast<uint64_t *>(smem + 65536),
            reinterpret_cast<uint32_t *>(smem));
  }
}

} // namespace mkernel
