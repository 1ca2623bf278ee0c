/*
 * knobs.h - every setting of the emulated node, by name. Latencies are model time; all may change
 * while running unless the text says "at start". One line here is all it takes to add one. X(name,
 * kind, default, text)    kind: "us"/"ms" (kept in ns), "int", "ratio" (kept in thousandths), or
 * the choices of an enum
 */
#ifndef VALVE_EMU_KNOBS_H
#define VALVE_EMU_KNOBS_H

#include <stdint.h>
#include <stdio.h>

#define KNOBS(X)                                                                                             \
	X(rpc_us, "us", "100",                                                                               \
	  "round trip of one command to the card's firmware, lock held (93-138 us measured)")                \
	X(preempt_us, "us", "200", "saving a compute context when channels are disabled")                    \
	X(enable_us, "us", "0", "and restoring one when channels are enabled")                               \
	X(runlist_us, "us", "0", "giving the card a new runlist: each call that changes what may run")       \
	X(switch_us, "us", "0", "work of a group that comes on after another begins so much later")          \
	X(masking_us, "us", "2", "taking one GPU's lock, for each GPU locked")                               \
	X(alloc_us, "us", "190", "cuMemCreate and every other memory object, API lock to write")             \
	X(alloc_mib_us, "us", "1.5", "and more for each MiB of it")                                          \
	X(free_us, "us", "23", "freeing a memory object")                                                    \
	X(map_us, "us", "35", "cuMemSetAccess: one mapping by UVM, page tables and TLB")                     \
	X(map_mib_us, "us", "0.5", "and more for each MiB of it")                                            \
	X(map_locked_us, "us", "25", "the part of map_us that holds the API lock to write and every GPU")    \
	X(unmap_us, "us", "25.2", "removing one mapping by UVM")                                             \
	X(unmap_mib_us, "us", "0.2", "and more for each MiB of it")                                          \
	X(sparse_us, "us", "24", "making a range sparse, however many mappings it replaces")                 \
	X(sparse_mib_us, "us", "0.05", "and more for each MiB of it")                                        \
	X(reserve_us, "us", "2", "cuMemAddressReserve")                                                      \
	X(book_us, "us", "1.45", "cuMemMap: books only, no call below")                                      \
	X(fill_gbps, "int", "2500", "GB/s of cuMemset, 0: costs nothing")                                    \
	X(copy_gbps, "int", "1500", "GB/s of a copy inside the card, 0: costs nothing")                      \
	X(poison, "int", "0", "new memory is full of this byte; 255: NaN as a float of any width")           \
	X(fills, "works,silent", "works", "silent: cuMemset says OK and writes nothing")                     \
	X(slice_us, "us", "1024", "time slice of a TSG that has set none")                                   \
	X(stop_wait_ms, "ms", "4000",                                                                        \
	  "closing a process: wait for each disabled channel that has work queued")                          \
	X(preempt_timeout_ms, "ms", "4300", "a channel that does not stop for so long is reset with an Xid") \
	X(lock, "stock,device-only,route-to-physical", "stock", "locks of the disable call")                 \
	X(gsp_foreign, "allow,deny,silent", "allow", "channels of other clients in a disable list")          \
	X(gsp_status, "int", "0x1b", "status of a denied foreign list")                                      \
	X(partial, "keep,none", "keep", "a bad pair in a list: earlier pairs take effect, or nothing does")  \
	X(schedule_enables, "int", "1", "SCHEDULE(bEnable=1) enables disabled channels")                     \
	X(stop_disabled, "wait,idle", "wait",                                                                \
	  "whether a disabled channel with work counts as busy at close")                                    \
	X(gpfifo_depth, "int", "1024", "work items a channel takes before a launch blocks")                  \
	X(gsp, "int", "1", "0: no firmware processor, the disable call is not supported")                    \
	X(mig, "int", "0", "1: the cards report MIG mode")                                                   \
	X(compute_mode, "int", "0", "as NVML numbers it: 0 default, 2 prohibited, 3 exclusive process")      \
	X(realtime, "int", "1", "run before ordinary processes where permitted, at start")                   \
	X(time_scale, "ratio", "1", "model microseconds per real microsecond, at start")

enum knob_id {
#define X(name, kind, preset, text) K_##name,
	KNOBS(X)
#undef X
	        K_COUNT
};
enum { LOCK_STOCK, LOCK_DEVICE_ONLY, LOCK_ROUTE_TO_PHYSICAL };
enum { FOREIGN_ALLOW, FOREIGN_DENY, FOREIGN_SILENT };
enum { PARTIAL_KEEP, PARTIAL_NONE };
enum { STOP_WAIT, STOP_IDLE };

int64_t knob(enum knob_id id);
void knobs_preset(void);
const char *knob_set(const char *name, const char *value); /* NULL, or what is wrong */
const char *knob_costs(const char *preset);                /* the memory costs of one kind of card */
void knobs_write(FILE *out);                               /* JSON object */

#endif
