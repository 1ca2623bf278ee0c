/*
 * work.c - how many basic blocks all threads of the gate run while the plan of a GPU is replaced by one like it: neither
 * load nor a cold cache changes it. Built with -fsanitize-coverage=trace-pc (test_gate_joins.py).
 *
 *     work PROCESSES CHANNELS     CHANNELS: of each process
 */
#include "fake_rm.h"
#include "peers.h"

#include <stdio.h>

enum { MOST = 4096, TURNS = 5 };

static struct valve_entry entries[MOST];
static struct valve_client *clients[MOST];
static uint64_t blocks;
static uint32_t counts;
static _Thread_local bool rests; /* this thread only waits: how often it looks says how slow the others are */

void __sanitizer_cov_trace_pc(void);

__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc(void)
{
	if (load_relaxed(&counts) && !rests)
		__atomic_add_fetch(&blocks, 1, __ATOMIC_RELAXED);
}

static uint64_t replace(struct valve_gate *gate, uint32_t count)
{
	uint32_t waiting;
	int status;

	store_full(&blocks, 0);
	store_full(&counts, 1);
	status = valve_arm(gate, 0, entries, count, NULL, 0, NULL, 0, NULL);
	rests = true;
	waiting = valve_gate_settle(gate, UINT32_MAX);
	rests = false;
	store_full(&counts, 0);
	if (status || waiting)
		abort();
	return load_full(&blocks);
}

int main(int argc, char **argv)
{
	const struct valve_config config = {
	        .lease_ns = UINT32_MAX * 1000ull, .hang_ns = 60000000000, .order_ns = 1000000};
	uint32_t processes = argc > 2 ? (uint32_t)atoi(argv[1]) : 1,
	         channels = argc > 2 ? (uint32_t)atoi(argv[2]) : 1, count = 0;
	uint64_t least = UINT64_MAX;
	struct valve_gate *gate;

	if (processes * channels > MOST)
		return 2;
	fake_reset();
	gate = valve_gate_open(&config, fake_machine());
	for (uint32_t p = 0; p < processes; p++) {
		uint32_t h_subdevice, h_client;
		int file, doorbell;

		clients[p] = peer_new(gate, p + 1, VALVE_ROLE_OFFLINE, -1, &doorbell);
		h_client = fake_client(&file, &h_subdevice, 0);
		for (uint32_t c = 0; c < channels; c++) {
			fake_channel(h_client, 0x5C000000 + c, 0);
			entries[count++] = (struct valve_entry){.client = clients[p],
			                                        .reach = VALVE_REACH_OWN,
			                                        .h_client = h_client,
			                                        .h_channel = 0x5C000000 + c,
			                                        .fd = -1};
		}
		close(file);
	}
	for (int turn = 0; turn < TURNS; turn++) {
		uint64_t found = replace(gate, count);

		if (turn > 0 && found < least)
			least = found;
	}
	valve_arm(gate, 0, NULL, 0, NULL, 0, NULL, 0, NULL);
	for (uint32_t p = 0; p < processes; p++)
		valve_client_free(gate, clients[p]);
	printf("%lu\n", least);
	return valve_gate_close(gate);
}
