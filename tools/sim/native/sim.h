/*
 * Replay core: what Python sees of it. Read by cffi as it stands between the two markers, so it stays free of
 * the preprocessor there.
 *
 * The core holds the mechanics (engines, memory, which side runs when). Decisions of the product stay in Python: the
 * core calls back on rare events only (pressure, ticks, wakes, a gap that could change the cooldown).
 */
#ifndef VALVE_SIM_H
#define VALVE_SIM_H

#include <stdint.h>

/* cdef-begin */
enum sim_compute {
	SIM_ALONE,
	SIM_CHANNEL,
	SIM_GPREEMPT,
	SIM_KERNEL_STRICT,
	SIM_KERNEL_TGS,
	SIM_LAYER,
	SIM_EDGE,
	SIM_SAME_ENGINE,
	SIM_TIME_SLICE
};

enum sim_job { SIM_JOB_NONE, SIM_JOB_SERVE, SIM_JOB_TRAIN };

enum sim_event { SIM_ON_PRESSURE, SIM_ON_TICK, SIM_ON_WAKE, SIM_ON_GAP, SIM_ON_SHORT };

/* One engine's timing; all in nanoseconds, per iteration, on one rank. */
struct sim_timing {
	double base_ns;
	double seq_ns;
	double context_token_ns;
	double prefill_token_ns;
	double attention_pair_ns;
	double fixed_ns;
	int64_t budget_tokens;
	int64_t max_seqs;
};

struct sim_gap {
	double median_ns;
	double sigma;
	double max_ns;
};

struct sim_params {
	uint64_t seed;
	int64_t end_ns;
	int32_t compute;
	int32_t hinted;
	int32_t gate_on_hint;
	int32_t handles;
	int32_t blocks_per_handle;
	int32_t offline_blocks_per_handle;
	int32_t block_tokens;
	struct sim_timing online;
	struct sim_timing offline;
	struct sim_gap gap;
	int64_t offline_gap_ns;
	int32_t job;
	int64_t train_step_ns;
	int64_t train_step_tokens;
	int32_t train_handles;
	int32_t offline_layers;
	int32_t gpus;
	int32_t serial_gate;
	double skew_max;
	double stop_median_ns;
	double stop_sigma;
	double stop_max_ns;
	double stop_hintless_ns;
	int64_t resume_ns;
	int64_t remap_ns;
	int64_t map_ns;
	int32_t online_elastic;
	int32_t online_reserve;
	int32_t offline_elastic;
	int32_t keep_prefix;
	double pressure_ratio;
	int32_t uvm;
	double uvm_evict_ns;
	double uvm_fault_ns;
	double tgs_units_per_ms;
	int64_t slice_ns;
	int64_t offline_slice_ns;
	int32_t trace;
};

struct sim_totals {
	int64_t now_ns;
	int64_t iterations;
	int64_t offline_iterations;
	int64_t online_busy_ns;
	int64_t idle_ns;
	int64_t offline_busy_ns;
	int64_t offline_useful_tokens;
	int64_t offline_lost_tokens;
	int64_t offline_finished;
	int64_t offline_preempted;
	int64_t online_preempted;
	int64_t stalls;
	int64_t stall_ns;
	int64_t memory_wait_ns;
	int64_t uvm_wait_ns;
	int64_t callbacks;
	int64_t checks;
	int64_t refused;
};

struct sim_memory {
	int32_t free;
	int32_t online_backed;
	int32_t online_busy;
	int32_t offline_backed;
	int32_t offline_busy;
	int32_t offline_held;
};

typedef int64_t (*sim_callback)(int32_t event, int64_t now_ns, int64_t a, int64_t b);

struct sim;

struct sim *sim_new(const struct sim_params *params, int64_t n_online, const int64_t *arrive_ns,
                    const int32_t *in_tok, const int32_t *out_tok, int64_t n_lengths,
                    const int32_t *offline_in, const int32_t *offline_out, sim_callback callback);
void sim_free(struct sim *s);
int sim_run(struct sim *s);
const char *sim_error(const struct sim *s);
int sim_check(struct sim *s);

void sim_totals(const struct sim *s, struct sim_totals *out);
void sim_memory(const struct sim *s, struct sim_memory *out);
void sim_online_times(const struct sim *s, int64_t *first_ns, int64_t *last_ns);
int64_t sim_gates(const struct sim *s, int64_t cap, int64_t *at_ns, int64_t *took_ns);
int64_t sim_idles(const struct sim *s, int64_t cap, int64_t *from_ns, int64_t *to_ns);
int64_t sim_usage(const struct sim *s, int64_t cap, int64_t *second, int64_t *handles);
int64_t sim_trace(const struct sim *s, int64_t cap, int64_t *rows);
int64_t sim_offline_blocks(const struct sim *s, int64_t cap, int32_t *request, int32_t *position,
                           int32_t *column);
int64_t sim_offline_requests(const struct sim *s, int64_t cap, int32_t *request, int32_t *tokens);
int32_t sim_offline_columns(const struct sim *s, int32_t cap, int32_t *column, int32_t *free_blocks);

int32_t sim_take_free(struct sim *s, int32_t n);
int32_t sim_take_columns(struct sim *s, int32_t n, const int32_t *columns);
int32_t sim_take_peak(struct sim *s);
int32_t sim_give(struct sim *s, int32_t n);
int32_t sim_back_offline(struct sim *s, int32_t n);
void sim_kill_offline(struct sim *s, int64_t back_at_ns, int64_t took_ns);
void sim_delay_mappings(struct sim *s, int64_t wait_ns);
void sim_set_tick(struct sim *s, int64_t at_ns);
void sim_set_cooldown(struct sim *s, int64_t cooldown_ns, int64_t floor_ns);
double sim_iteration_ns(const struct sim_timing *t, int64_t seqs, int64_t context, int64_t prefill,
                        double pairs);
/* cdef-end */

#endif
