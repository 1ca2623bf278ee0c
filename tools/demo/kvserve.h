/* kvserve.h - KV memory of the online workload: a request enters when there are blocks for it. Without kvserve_open every
 * call does nothing and every request enters. */
#ifndef VALVE_DEMO_KVSERVE_H
#define VALVE_DEMO_KVSERVE_H

#include "arrivals.h"
#include "driver.h"

struct kvserve_plan {
	double blocks, block_kib, planes;
};

bool kvserve_open(const struct kvserve_plan *plan, unsigned seats); /* false: the plan makes no sense */
bool kvserve_enter(struct request *request);
void kvserve_leave(struct request *request);
void kvserve_launch(CUstream stream, struct request *const *requests, unsigned count); /* a step */
void kvserve_check(struct request *const *requests, unsigned count);                   /* it is over */
/* Between steps: what is used, and what those who wait need. */
void kvserve_publish(struct request *const *active, unsigned batch, const struct request *waiting,
                     unsigned count);
double kvserve_nap(double seconds); /* how long to sleep when nothing runs: valved may want something */
void kvserve_summarise(void);
bool kvserve_is_sound(void);

#endif
