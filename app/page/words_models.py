"""Words of the panels "Models" and "Compare", in English and Japanese."""

# ruff: noqa: RUF001 - Japanese has colons, brackets and question marks of its own

from __future__ import annotations

from dataclasses import dataclass

LANGUAGES = ("en", "ja")


@dataclass(frozen=True, slots=True)
class Words:
    """The words of one language: `words("models_load")`, with values for what stands in braces."""

    lang: str

    def __call__(self, key: str, **values: object) -> str:
        text = WORDS[key][LANGUAGES.index(self.lang)]
        return text.format(**values) if values else text


WORDS: dict[str, tuple[str, str]] = {
    # Memory
    "memory_title": ("Memory for models", "モデル用メモリ"),
    "memory_weights": ("weights", "重み"),
    "memory_kv": ("contexts", "コンテキスト"),
    "memory_cache": ("prefix cache", "プレフィックスキャッシュ"),
    "memory_other": ("other programs", "他のプログラム"),
    "memory_free": ("free", "空き"),
    # The list
    "models_filter": ("Filter", "絞り込み"),
    "models_filter_hint": ("Part of a name, a licence or an ability", "名前・ライセンス・機能の一部"),
    "models_only_here": ("Only what is on this machine", "このマシンにあるものだけ"),
    "models_table": ("Models", "モデル一覧"),
    "models_none": ("No model is like that", "該当するモデルはありません"),
    "models_name": ("Model", "モデル"),
    "models_size": ("Size", "サイズ"),
    "models_parameters": ("Parameters", "パラメータ"),
    "models_bits": ("Bits", "ビット"),
    "models_licence": ("Licence", "ライセンス"),
    "models_can": ("Can", "機能"),
    "models_fit": ("Fits here", "動作の見込み"),
    "models_state": ("State", "状態"),
    "models_count": ("{shown} of {all} models", "{all} 件中 {shown} 件"),
    "state_catalogue": ("can be fetched", "取得できます"),
    "state_registered": ("here", "保存済み"),
    "state_loading": ("loading …", "読み込み中…"),
    "state_loaded": ("loaded", "読み込み済み"),
    "state_at_work": ("loaded, at work", "読み込み済み・使用中"),
    "state_unloading": ("unloading …", "解放中…"),
    "state_failed": ("failed", "失敗"),
    "state_pinned": ("pinned", "固定中"),
    "can_chat": ("chat", "チャット"),
    "can_completion": ("completion", "文章補完"),
    "can_embedding": ("embeddings", "埋め込み"),
    "can_reranking": ("reranking", "リランキング"),
    "can_thinking": ("thinking", "思考"),
    "can_tools": ("tools", "ツール"),
    "can_vision": ("vision", "画像"),
    "can_code": ("code", "コード"),
    "fit_yes": ("yes", "動作します"),
    "fit_tight": ("tight", "余裕なし"),
    "fit_no": ("no", "動作しません"),
    "tok_s": ("{rate} tok/s", "{rate} トークン/秒"),
    # One model
    "detail_none": ("Choose a model in the list.", "一覧からモデルを選んでください。"),
    "detail_yes": ("It fits", "このマシンで動作します"),
    "detail_tight": ("It fits, but only just", "動作しますが、余裕がありません"),
    "detail_no": ("It doesn't fit this machine", "このマシンでは動作しません"),
    "detail_unknown": ("Whether it fits isn't known", "動作するかどうかは不明です"),
    "detail_needs": (
        "{total} with a context of {context} tokens: weights {weights}, contexts {cache}, the rest {rest}. "
        "Models may take {budget} here.",
        "コンテキスト {context} トークンで {total}：重み {weights}、コンテキスト {cache}、その他 {rest}。"
        "このマシンでモデルに使えるのは {budget} です。",
    ),
    "detail_longest": ("Longest context that fits: {context} tokens", "収まる最長のコンテキスト：{context} トークン"),
    "detail_speed": (
        "Predicted: {rate} tok/s in one stream (memory bandwidth {bandwidth} GB/s)",
        "予測速度：1 ストリームで {rate} トークン/秒（メモリ帯域 {bandwidth} GB/s）",
    ),
    "detail_from": ("From: {origin}", "入手元：{origin}"),
    "models_load": ("Load", "読み込む"),
    "models_unload": ("Unload", "メモリから解放"),
    "models_pull": ("Fetch", "取得"),
    "models_pin": ("Pin in memory", "メモリに固定"),
    "models_unpin": ("Unpin", "固定を解除"),
    "models_delete": ("Delete from disk", "ディスクから削除"),
    "models_delete_sure": ("Delete {name} ({size}) from disk?", "{name}（{size}）をディスクから削除しますか？"),
    "models_delete_yes": ("Delete for good", "完全に削除"),
    "models_delete_no": ("Keep it", "残す"),
    "models_deleted": ("{name} was deleted; {freed} are free again.", "{name} を削除しました。{freed} 空きました。"),
    "models_loads": ("{name} is being loaded.", "{name} を読み込んでいます。"),
    "models_unloaded": ("{name} was unloaded.", "{name} をメモリから解放しました。"),
    "models_pinned": ("{name} stays in memory once it is loaded.", "{name} は読み込み後もメモリに残ります。"),
    "models_unpinned": ("{name} may give way to others.", "{name} は必要に応じて解放されます。"),
    "models_pulls": ("{name} is being fetched.", "{name} を取得しています。"),
    # Adapters
    "adapters": ("Adapters", "アダプター"),
    "adapters_hint": (
        "A folder that `mlxinfer lora train` wrote. The model is then there as MODEL:NAME, too.",
        "`mlxinfer lora train` が書き出したフォルダー。モデルは「モデル名:アダプター名」でも選べるようになります。",
    ),
    "adapter_name": ("Name", "名前"),
    "adapter_folder": ("Folder", "フォルダー"),
    "adapter_add": ("Add adapter", "アダプターを追加"),
    "adapter_added": ("{name} can be chosen now.", "{name} を選べるようになりました。"),
    "adapter_drop": ("Take off", "外す"),
    "adapter_drop_of": ("Take {name} off", "{name} を外す"),
    "adapter_dropped": ("{name} was taken off; its files stay.", "{name} を外しました。ファイルは残ります。"),
    # Pulls
    "pull_name": ("Fetch another model", "ほかのモデルを取得"),
    "pull_hint": ("org/name on the hub, or a folder or .gguf file", "ハブの org/name、フォルダー、または .gguf"),
    "pull_button": ("Fetch", "取得"),
    "pulls": ("On their way", "取得の状況"),
    "pull_resolve": ("asking …", "照会中…"),
    "pull_download": ("downloading", "ダウンロード中"),
    "pull_unpack": ("unpacking", "展開中"),
    "pull_verify": ("checking", "検証中"),
    "pull_cancelling": ("being cancelled …", "中止しています…"),
    "pull_cancelled": ("cancelled; what arrived is kept", "中止しました（受信済みの分は残ります）"),
    "pull_failed": ("broke off", "中断しました"),
    "pull_done": ("here", "完了"),
    "pull_of": ("{done} of {total}", "{total} 中 {done}"),
    "pull_rate": ("{rate}/s", "{rate}/秒"),
    "pull_left": ("{time} left", "残り {time}"),
    "pull_cancel": ("Cancel", "中止"),
    "pull_resume": ("Resume", "再開"),
    "pull_discard": ("Discard", "破棄"),
    "pull_clear": ("Clear", "消す"),
    "pull_progress": ("Progress of {name}", "{name} の進み具合"),
    # Compare
    "compare_prompt": ("One prompt for both", "両方に送るプロンプト"),
    "compare_prompt_hint": ("Enter compares, Shift+Enter begins a new line.", "Enter で比較、Shift+Enter で改行。"),
    "compare_system": ("System prompt of both", "両方のシステムプロンプト"),
    "compare_left": ("Left model", "左のモデル"),
    "compare_right": ("Right model", "右のモデル"),
    "compare_sampling": ("Sampling of both", "両方のサンプリング設定"),
    "compare_temperature": ("Temperature", "温度"),
    "compare_top_p": ("Top p", "Top p"),
    "compare_top_k": ("Top k (0: all)", "Top k（0：制限なし）"),
    "compare_min_p": ("Min p", "Min p"),
    "compare_repetition_penalty": ("Repetition penalty", "繰り返しペナルティ"),
    "compare_max_tokens": ("Most tokens", "最大トークン数"),
    "compare_seed": ("Seed", "シード"),
    "compare_keep": ("Keep both as conversations", "両方を会話として保存"),
    "compare_run": ("Compare", "比較する"),
    "compare_stop": ("Stop", "停止"),
    "compare_continue": ("Continue this one as a chat", "こちらをチャットで続ける"),
    "compare_better": ("This one is better", "こちらが良い"),
    "compare_continued": (
        "It is among your conversations now: “{title}”.",
        "会話に追加しました：「{title}」",
    ),
    "compare_votes": ("Votes: {left} {a} : {b} {right}", "投票：{left} {a} : {b} {right}"),
    "compare_no_model": (
        "No model is here yet: fetch one in the tab “Models”.",
        "まだモデルがありません。「モデル」タブで取得してください。",
    ),
    "compare_choose": ("Choose a model for each column.", "両方の列のモデルを選んでください。"),
    "compare_column": ("Reply of {name}", "{name} の返答"),
    "compare_thinking": ("Thinking", "思考"),
    "compare_shared": (
        "Both run at the same time and share the machine: each is slower than alone.",
        "両方を同時に実行するため、それぞれ単独のときより遅くなります。",
    ),
    "compare_same_so_far": ("Same text so far ({count} characters)", "ここまで同じ（{count} 文字）"),
    "compare_same": ("Both replies are the same text", "両方とも同じ文章です"),
    "compare_first_word": ("They differ from the first word on", "最初の単語から異なります"),
    "compare_differs": ("Same text up to here: {count} characters", "{count} 文字目まで同じ文章です"),
    "compare_here": ("The replies differ from here on", "ここから異なります"),
    "stage_loading": ("loading the model …", "モデルを読み込み中…"),
    "stage_waiting": (
        "waits until the other one has given back its memory …",
        "もう一方がメモリを返すのを待っています…",
    ),
    "stage_reading": ("reading the prompt …", "プロンプトを処理中…"),
    "stage_writing": ("writing …", "生成中…"),
    "stage_done": ("done", "完了"),
    "stage_stopped": ("stopped", "停止しました"),
    "stage_failed": ("failed", "失敗"),
    "figure_tokens": ("{count} tokens", "{count} トークン"),
    "figure_ttft": ("first token after {seconds} s", "最初のトークンまで {seconds} 秒"),
    "figure_cached": ("{count} tokens from the cache", "キャッシュから {count} トークン"),
}
"""Each key: the English text, the Japanese one."""
