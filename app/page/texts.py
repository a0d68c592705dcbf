"""All words of the page, in English and Japanese."""

from __future__ import annotations

from dataclasses import dataclass

from mlxinfer.app.page import words_models

LANGUAGES = ("en", "ja")


@dataclass(frozen=True, slots=True)
class Texts:
    """The words of one language: `texts("send")`, with values for what stands in braces."""

    lang: str

    def __call__(self, key: str, **values: object) -> str:
        text = (WORDS.get(key) or words_models.WORDS[key])[LANGUAGES.index(self.lang)]
        return text.format(**values) if values else text


WORDS: dict[str, tuple[str, str]] = {
    # The frame
    "title": ("mlxinfer", "mlxinfer"),
    "chat": ("Chat", "チャット"),
    "models": ("Models", "モデル"),
    "compare": ("Compare", "比較"),
    "other_language": ("日本語", "English"),
    "theme": ("Light or dark", "明るさの切り替え"),
    "conversations": ("Conversations", "会話"),
    "toggle_sidebar": ("Show or hide the conversations", "会話一覧の表示・非表示"),
    # The sidebar
    "new_chat": ("New chat", "新しいチャット"),
    "search": ("Search", "検索"),
    "search_hint": ("Search all messages", "すべてのメッセージを検索"),
    "import": ("Import", "読み込む"),
    "imported": ("“{title}” was imported", "「{title}」を読み込みました"),
    "no_chats": ("No conversations yet", "まだ会話がありません"),
    "no_hits": ("Nothing found", "見つかりません"),
    "untitled": ("Untitled", "無題"),
    "pinned": ("pinned", "固定中"),
    "actions_for": ("Actions for “{title}”", "「{title}」の操作"),
    "rename": ("Rename", "名前を変更"),
    "new_title": ("New title", "新しい名前"),
    "pin": ("Pin", "固定する"),
    "unpin": ("Unpin", "固定を解除"),
    "export_md": ("Export as Markdown", "Markdown で書き出す"),
    "export_json": ("Export as JSON", "JSON で書き出す"),
    "delete": ("Delete", "削除"),
    "deleted": ("“{title}” was deleted.", "「{title}」を削除しました。"),
    "undo": ("Undo", "元に戻す"),
    # The chat
    "conversation": ("Conversation", "会話の内容"),
    "last_exchange": ("Last question and answer", "直近のやり取り"),
    "model": ("Model", "モデル"),
    "message": ("Message", "メッセージ"),
    "message_hint": (
        "Write a message. Enter sends, Shift+Enter begins a new line.",
        "メッセージを入力。Enter で送信、Shift+Enter で改行。",
    ),
    "hello": (
        "### What would you like to know?\nWhat you write stays on this machine.",
        "### ご用件をどうぞ\n入力した内容はこのパソコンの外に出ません。",
    ),
    "no_model": (
        "### No model yet\nFetch the small demo model with one click below, or choose one in the tab “Models”.",
        "### まだモデルがありません\n下のボタンで小さなデモモデルを取得するか、「モデル」タブで選んでください。",
    ),
    "on_its_way": (
        "### The model is on its way\nIt can be asked as soon as it is here.",
        "### モデルを取得しています\n届き次第、質問できます。",
    ),
    "get_demo": ("Get the demo model ({size})", "デモモデルを取得({size})"),
    "fetching": ("Fetching {name}: {percent}", "{name} を取得中: {percent}"),
    "fetch_failed": ("{name} could not be fetched: {error}", "{name} を取得できませんでした: {error}"),
    "choose_model": ("Choose a model first.", "先にモデルを選んでください。"),
    "loading": ("Loading {model} …", "{model} を読み込み中…"),
    "reading": ("Reading {tokens} tokens …", "{tokens} トークンを処理中…"),
    "counting": ("Reading the files …", "ファイルを読み込み中…"),
    "thinking": ("Thinking", "思考"),
    "tool_call": ("Tool call: {name}", "ツール呼び出し: {name}"),
    "failed": ("This reply failed: {error}", "返答に失敗しました: {error}"),
    "stopped": ("stopped", "停止"),
    "cut_off": ("cut off when the app ended", "アプリの終了により中断"),
    "at_limit": ("at the length limit", "長さの上限に到達"),
    "speed": ("{speed} tok/s", "{speed} tok/s"),
    "ttft": ("first token after {seconds} s", "最初のトークンまで {seconds} 秒"),
    "counts": ("{new} tokens", "{new} トークン"),
    "cached": ("{cached} of {prompt} from the cache", "{prompt} 中 {cached} はキャッシュ"),
    "by_model": ("{model}", "{model}"),
    "retry": ("Try again", "再生成"),
    "continue": ("Continue", "続きを書く"),
    "edit": ("Edit", "編集"),
    "earlier": ("Earlier version", "前の版"),
    "later": ("Later version", "次の版"),
    "editing": (
        "You are editing an earlier message. What came after it is kept as another branch.",
        "以前のメッセージを編集中です。その後のやり取りは別の枝として残ります。",
    ),
    "cancel": ("Cancel", "取り消す"),
    "attached": ("{name} · {tokens} tokens", "{name} · {tokens} トークン"),
    "meter": ("{used} of {context} tokens", "{context} 中 {used} トークン"),
    "meter_label": ("Context used", "コンテキスト使用量"),
    "no_images": (
        "{name} is an image, and no model here reads images. It was not attached.",
        "{name} は画像です。画像を読めるモデルはここにないため、添付しませんでした。",
    ),
    "too_long": (
        "Too long for {model}: with the files the message takes {needed} tokens of {context}. Nothing was sent or cut.",
        "{model} には長すぎます: ファイルを含めて {needed} トークン(上限 {context})。何も送信していません。",
    ),
    # Settings
    "settings": ("Settings of this chat", "このチャットの設定"),
    "system": ("System prompt", "システムプロンプト"),
    "system_hint": ("How the model should answer", "モデルの答え方"),
    "preset": ("Presets", "プリセット"),
    "preset_hint": ("Choose a saved prompt, or type a new name", "保存したものを選ぶか、新しい名前を入力"),
    "save_preset": ("Save", "保存"),
    "delete_preset": ("Delete", "削除"),
    "preset_saved": ("Saved as “{name}”", "「{name}」として保存しました"),
    "preset_needs_name": ("Type a name for the preset first.", "先にプリセットの名前を入力してください。"),
    "temperature": ("Temperature", "Temperature"),
    "top_p": ("Top p", "Top p"),
    "top_k": ("Top k", "Top k"),
    "min_p": ("Min p", "Min p"),
    "repetition_penalty": ("Repetition penalty", "Repetition penalty"),
    "max_tokens": ("Longest reply, in tokens", "返答の最大トークン数"),
    "seed": ("Seed", "シード"),
    "stop": ("Stop before", "この文字列の前で停止"),
    "schema": ("JSON schema of the reply", "返答の JSON スキーマ"),
    "thinking_mode": ("Thinking", "思考"),
    "as_model": ("as the model does", "モデルに任せる"),
    "on": ("on", "オン"),
    "off": ("off", "オフ"),
    "random": ("random", "ランダム"),
    "no_limit": ("end of context", "コンテキストの終わりまで"),
    "model_default": ("default", "既定値"),
}
"""Key → (English, Japanese). What is in braces is filled in."""
