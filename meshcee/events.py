"""What a run tells of itself while it goes on: the names of the lines of its log that programs and tests wait for.

The idea: a line of a log is an event with fields. Whoever waits for one compares it with its name here, not with a text.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Event"]


class Event(StrEnum):
    """Each is the sentence that people read."""

    PLANNED = "planned"
    PLANNED_HERE = "planned here: the coordinator sees no way, or plans what was not asked for"
    PLAN_CHANGES = "the plan changes"
    PLAN_CHANGED = "since the plan changed"
    PLAN_STAYS = "the plan stays"
    PLAN_STAYS_TO_THE_END = "the plan stays: the job ends before a change would pay"
    TAKEN_BACK = "steps are taken back: a member has lied, or left while it was audited"
    MEMBER_LOST = "a member was lost"
    STAGES_GIVEN_UP = (
        "the run goes on with another number of stages than was asked for: so many peers can take part now"
    )
    STATE_FOUND = "the state to go on from"
    RUN_GOES_ON = "the run goes on"
    MEMBERS_NEEDED = "members want to leave and the job cannot go on without them: start more peers"
    DATA_NEEDED = "this peer leaves once another one has the data that it supplies: give that to another with --dataset"
    DATA_AWAITED = "data is awaited"
    ALONE = "this process trains alone: say join=, or local=N for N peers in it"
    UNFINISHED = "a run of this output_dir is unfinished: train(resume_from_checkpoint=True) goes on with it"
    FRESH_OPTIMIZER = (
        "this train() begins with a fresh optimizer, where transformers keeps the moments of the one before: write max_steps or "
        "num_train_epochs for both, and train(resume_from_checkpoint=True) goes on with the moments"
    )
    GROUP_UNMET = "a pattern of the optimizer's groups= changes nothing"
    CODE_WARNS = "the job's code warns"
    PART_IN_EVAL = (
        "the model is in train mode, and these modules inside are in eval mode and stay so: dropout is off, and batch norm keeps "
        "its statistics; if your loop calls model.train(), call it before the job"
    )
    ENDED_EARLY = "EarlyStop has ended this run: raise its patience or leave it out to train on"
    LEFT_IN_EVAL = (
        "a callback has left the model in eval mode: peers train on, as a loop that calls train() in each step"
    )
    WEIGHTS_READ = (
        "a callback reads weights of the model, which are here as they were before the first step: for an average take Job(ema=), "
        "for an evaluation Job(eval_data=), for the newest weights a checkpoint"
    )
    WHOLE_BATCHES = (
        "the loss of a batch is not what the losses of its parts add up to, so a step has one micro-batch, as a loop without "
        "accumulation: say micro_batch_size for smaller ones, what a mean counts with weight=, or reduction='sum'"
    )
    ADDS_UP = (
        "the loss adds up over samples, and a micro-batch counts by its share of the batch, as means do: say reduction='sum' to "
        "have all count whole"
    )
    WEIGHTS_WRITTEN = (
        "weights of the model were written while the run goes on: peers train weights of their own, and what was written changes "
        "none of these"
    )
    READING_CHANGED = (
        "a callback changes what samples are read with, and steps to come may have been read or drawn by then. If it changes "
        "samples or their order, the run has other numbers than a plain loop: change it in on_step of a Callback whose class has "
        "waits = 'steps', and an order by the data epoch alone, as sampler=f(epoch, seed)"
    )
    SCHEDULE_OVER = (
        "a callback has set the learning rate, which stays so to the end, and the job's schedule counts no more: to keep the "
        "schedule, multiply its rates by run.scale_lr"
    )
    NEVER_EVALUATED = "the job has metrics, which evaluations compute, and no eval_data: none is computed"
    EVALUATED_ONCE = "evaluations come after the last step alone: give the job eval_every"
    NOT_KEPT = "this state is not kept: members have no room for a copy of it"
    ONLY_IN_MEMORY = (
        "the disk refuses the last weights, and the run is stopped: its folder has an earlier checkpoint alone; the weights are "
        "in memory"
    )
    NOTHING_COUNTS = "no label of this step counts, so it trains nothing: look at Job.weight and at how samples are cut"
    NO_BEST = "the model has the last weights: those of the best evaluation are not on the disk"
    SHARES = "micro-batches go to other pipelines: no plan changes"
    COPIES_MADE = "copies"
    FAR_COPIES_MADE = "far copies"
    COPIES_OUT_OF_REACH = "copies are out of a member's reach"
    NO_KEEPER = "a stage has no keeper: the peer has no memory for its copies"
    NO_FAR_COPIES = "no copies in other regions: the peer has no memory for them"
    CHECKPOINT_MISSED = "a checkpoint that was asked for was never made: a peer was lost, or the disk refused it"
    CHECKPOINTS_UNREAD = (
        "the disk does not tell which checkpoints there are: the run goes on with what is known of them"
    )
    JOURNAL_OUTGROWN = (
        "the run's journal has outgrown a peer: a standby that comes once the owner is dead goes on from before"
    )
    SOURCE_LEFT_OUT = "a source of copies is left out"
    STREAM_CLOSED = "stream.closed"
    STREAM_REFUSED = "stream.refused"
    HANDLER_FAILED = "stream.handler_failed"
    RECORD_SET_ASIDE = "record set aside"
    CLAIM_NOT_WRITTEN = "claim not written"
    DEVICE_CONFINED = "this peer's device computes in a process of its own"
    DEVICE_AWAY = "this peer's device is away: its process has ended"
    DEVICE_BACK = "this peer's device is back"
    MEMBERSHIP_OVER = "this peer is no member of its mesh any more"
    MOVED = "this machine has other addresses"
    NO_ANSWER_YET = "no answer yet from the addresses to join at: still trying"
    MESH_GONE = "no peer of the mesh answers any more: what is shown is what was seen last"
    MESH_BACK = "peers of the mesh answer again"
    IDENTITY_USED_TWICE = "another process uses this peer's identity"
